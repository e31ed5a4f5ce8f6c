"""The safetensors format: eight bytes with the length of a header, the header in JSON, then the tensors' bytes.

Read and written here a part of a tensor at a time, without mapping files into memory: what is read of a checkpoint of
any size takes no more memory than what is asked for.
"""

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from meshwright.errors import UserError
from meshwright.files import sync

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""The types of tensors that can be read, by their names in the format."""

_LARGEST_HEADER = 100 * 2**20
_PIECE_BYTES = 8 * 2**20

Index = tuple[slice, ...]


class Entry(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Of its first byte in the file."""


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file, by name.

    Raises:
        UserError: it isn't in this format, or is cut short.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise UserError(f"{path}: not a safetensors file, or cut short; fetch it again")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {name: _entry(path, 8 + length, about) for name, about in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: its header is broken; fetch it again") from None
    for name, entry in entries.items():
        end = entry.start + header[name]["data_offsets"][1] - header[name]["data_offsets"][0]
        if end > size:
            raise UserError(f"{path}: {size:,} bytes, but {name} ends at byte {end:,}: cut short; fetch it again")
    return entries


def _entry(path: Path, data_start: int, about: dict[str, Any]) -> Entry:
    first, end = about["data_offsets"]
    entry = Entry(path, about["dtype"], tuple(about["shape"]), data_start + first)
    if entry.dtype in DTYPES and end - first != math.prod(entry.shape) * DTYPES[entry.dtype].itemsize:
        raise ValueError
    return entry


def read_tensor(name: str, entry: Entry, index: Index = ()) -> np.ndarray:
    """A part of a tensor, as float32.

    Arguments:
        name: the tensor's, for messages.
        entry: where it lies.
        index: a slice of each axis, with steps of 1; axes left out are whole.

    Raises:
        UserError: its type can't be read.
    """
    if entry.dtype not in DTYPES:
        raise UserError(
            f"{entry.path}: {name} is of type {entry.dtype}: can be {', '.join(DTYPES)}; convert the checkpoint first"
        )
    dtype, shape = DTYPES[entry.dtype], entry.shape or (1,)
    cut = [part.indices(size)[:2] for part, size in zip(index, shape, strict=False)]
    cut += [(0, size) for size in shape[len(cut) :]]
    (first, last), rest = cut[0], tuple(slice(*borders) for borders in cut[1:])
    result = np.empty([end - start for start, end in cut], np.float32)
    row = math.prod(shape[1:])
    rows = max(1, _PIECE_BYTES // max(1, row * dtype.itemsize))
    with open(entry.path, "rb", buffering=0) as file:
        for start in range(first, last, rows):
            many = min(rows, last - start)
            piece = bytearray(many * row * dtype.itemsize)
            file.seek(entry.start + start * row * dtype.itemsize)
            _fill(file, piece)
            block = np.frombuffer(piece, dtype).reshape(many, *shape[1:])
            result[start - first : start - first + many] = block[(slice(None), *rest)]
    return result.reshape(()) if not entry.shape else result


def _fill(file: Any, piece: bytearray) -> None:
    view = memoryview(piece)
    while view:
        many = file.readinto(view)
        if not many:
            raise OSError(None, "cut short while it was read", file.name)
        view = view[many:]


def write_file(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write a file, one tensor at a time.

    Arguments:
        path: of the new file.
        shapes: of its tensors, in the order in which they lie.
        dtype: a key of `DTYPES`: the type of all of them.
        tensors: name and float32 array of each, in that order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, kind = 0, DTYPES[dtype]
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
            assert (given, tensor.shape) == (name, shape)
            file.write(np.ascontiguousarray(tensor, kind).reshape(-1).view(np.uint8).data)
    sync(path)
