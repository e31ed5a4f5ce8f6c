"""What tells the parameters of one base from those of another, whatever the mesh."""

import zlib

import torch
from torch.distributed.tensor import DTensor

from meshwright.engines.torch.collectives import reduced
from meshwright.engines.torch.plan import Placed

_AT_ONCE = 2**22  # numbers
_SPREAD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd, with bits all over


def base_fingerprint(placed: Placed) -> str:
    """Sums of the numbers' bits, each multiplied by one that its place makes, modulo 2^64.

    Arguments:
        placed: a model whose tensors are whole in each process, or shared over the `fsdp` axis.
    """
    total = torch.zeros(2, dtype=torch.int64, device=placed.mesh.device)
    for name in (*placed.tensors, *placed.quantized):
        if name in placed.parameters:  # an adapter's
            continue
        if not isinstance(placed.tensors.get(name), DTensor) and placed.mesh.place("fsdp"):  # whole in each process
            continue
        start, part, places = zlib.crc32(name.encode()), placed.part(name), placed.mine(name)
        if not places:
            total += _sums(start, part, places)
            continue
        each = max(1, _AT_ONCE * part.shape[0] // max(part.numel(), 1))  # what is made of a piece is six times as large
        for number, piece in enumerate(part.split(each)):
            first = places[0][0] + number * each
            total += _sums(start, piece, [(first, first + piece.shape[0]), *places[1:]])
    mesh = placed.mesh.mesh
    group = None if mesh is None else mesh.get_group("fsdp")
    return "".join(f"{number % 2**64:016x}" for number in reduced(total, group).tolist())


def _sums(start: int, part: torch.Tensor, places: list[tuple[int, int]]) -> torch.Tensor:
    bits = part.float().contiguous().view(torch.int32).to(torch.int64)
    place = torch.full_like(bits, start)
    for axis, (first, last) in enumerate(places):
        numbers = torch.arange(first, last, device=bits.device)
        place = (place + numbers.view(-1, *[1] * (bits.dim() - axis - 1))) * _SPREAD[0]
    return torch.stack([(bits * (place * spread | 1)).sum() for spread in _SPREAD])
