"""How the maps of a layer are cut among the processes of a tensor group.

A plan says for each map of a layer `colwise` (each process makes a share of what comes out) or `rowwise` (each takes a
share of what goes in, and the sums are added). Models of `transformers` bring one (`base_model_tp_plan`); the table
below has those of models that don't. Between the maps that are cut, time is (`TensorGroup`), and there each process
computes its part of everything: so a gradient of what isn't cut is its part of a sum.
"""

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers.pytorch_utils import Conv1D

from meshwright.engines.torch.build import FusedMaps, fused
from meshwright.engines.torch.collectives import TensorGroup, reduced
from meshwright.errors import UserError

PLANS: dict[str, dict[str, str]] = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    "codegen": {
        "h.*.attn.qkv_proj": "colwise",
        "h.*.attn.out_proj": "rowwise",
        "h.*.mlp.fc_in": "colwise",
        "h.*.mlp.fc_out": "rowwise",
    },
}
"""Plans by `model_type`, with names as in the model without its head."""

_WHOLE = ("replicated_with_grad_allreduce",)  # used by each process on its own heads


def plan_of(model: Any) -> dict[str, str]:
    """Which maps are cut, and how, by their names in the whole model.

    Arguments:
        model: of `transformers`.

    Raises:
        UserError: it has no plan, one that isn't supported, or one that leaves out what must be cut, too.
    """
    kind = model.config.model_type
    plan = PLANS.get(kind) or getattr(model.config, "base_model_tp_plan", None)
    if not plan:
        raise UserError(f"mesh.tensor: there is no plan by which {kind} is cut; set it to 1, and raise mesh.fsdp")
    prefix, found = f"{model.base_model_prefix}.", {}
    for name, module in model.base_model.named_modules():
        styles = [style for pattern, style in plan.items() if fnmatchcase(name, pattern)]
        if not styles or styles[0] in _WHOLE or module is model.get_input_embeddings():
            continue
        if styles[0] not in ("colwise", "rowwise"):
            raise UserError(
                f'mesh.tensor: {name} of {kind} would be cut "{styles[0]}", which the PyTorch engine doesn\'t do; '
                "set it to 1, and raise mesh.fsdp"
            )
        found[prefix + name] = styles[0]
    _check_widths(model, found, plan)
    return found


def cut(model: Any, tensor: TensorGroup, mesh: DeviceMesh) -> None:
    """Cut a model's maps, embeddings and head in place; its parameters have no numbers yet.

    Arguments:
        model: from `meshwright.engines.torch.build.skeleton`.
        tensor: the processes.
        mesh: theirs.

    Raises:
        UserError: see `plan_of`.
    """
    parents = set()
    for name, style in plan_of(model).items():
        module = model.get_submodule(name)
        if style == "colwise":
            parent = name.rpartition(".")[0]
            parents.add(parent)
            _cut_colwise(module, mesh)
            cut_attention(model, name, tensor.size)
        else:
            _cut_rowwise(module, tensor, mesh)
    if tensor.cuts_time:
        for name in sorted(parents):
            model.get_submodule(name).register_forward_pre_hook(_entering(tensor), with_kwargs=True)
    else:
        _cut_head(model.get_output_embeddings(), mesh)
    _cut_vocabulary(model, tensor, mesh)


def cut_attention(model: Any, name: str, size: int) -> None:
    """Tell an attention how much of its queries, keys and values is left, where one map gives all of them.

    Arguments:
        model: of `transformers`.
        name: of the map.
        size: how many processes share it.

    Raises:
        UserError: they can't.
    """
    attention = model.get_submodule(name.rpartition(".")[0])
    if isinstance(model.get_submodule(name), FusedMaps):  # GPT-2 takes the maps apart by this width
        attention.split_size //= size
    elif model.config.model_type == "codegen" and name.endswith("qkv_proj"):
        # The map gives queries, values and keys of a share of the heads, then of the next.
        groups = getattr(attention, "mp_num", None)
        if groups is None:
            raise UserError(
                "mesh.tensor: CodeGen can't be cut in this version of transformers; install a newer one, or set it to "
                "1, and raise mesh.fsdp"
            )
        if groups % size:
            raise UserError(
                f"mesh.tensor = {size}: must divide the {groups} groups of heads that CodeGen's queries, values and "
                f"keys come in (it leaves {groups % size}); lower it, and raise mesh.fsdp"
            )
        attention.mp_num //= size
        attention.embed_dim //= size


def local(parameter: torch.Tensor | None) -> Any:
    """This process's share of a parameter that is cut; its gradient is that share's."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def share(size: int, tensor: TensorGroup) -> tuple[int, int]:
    """First and last place (excluded) of this process's share of an axis."""
    each = -(-size // tensor.size)
    return min(each * tensor.rank, size), min(each * (tensor.rank + 1), size)


def gathered_scores(scores_NV: torch.Tensor, vocab: int, tensor: TensorGroup) -> torch.Tensor:
    """Scores of the whole vocabulary, where each process has those of its share."""
    whole_NV = scores_NV.new_zeros(len(scores_NV), vocab)
    first, last = share(vocab, tensor)
    whole_NV[:, first:last] = scores_NV
    return reduced(whole_NV, tensor.group)


def _check_widths(model: Any, found: dict[str, str], plan: dict[str, str]) -> None:
    """Refuse what a layer does with all of a width, or with each head, where a process has a share of them."""
    kind = model.config.model_type
    if any(getattr(model.config, "activation_sparsity_pattern", None) or ()):  # by mean and deviation
        raise UserError(
            f"mesh.tensor: {kind} chooses by the whole feed-forward width what is active "
            "(activation_sparsity_pattern), so that it isn't cut; set it to 1, and raise mesh.fsdp"
        )
    for cut_name in (name for name, style in found.items() if style == "colwise" and kind not in PLANS):
        parent = cut_name.rpartition(".")[0]
        layer, width = model.get_submodule(parent), len(model.get_submodule(cut_name).weight)
        head = getattr(layer, "head_dim", 1)
        for name, parameter in layer.named_parameters(prefix=parent):
            module = name.rpartition(".")[0]
            if module in found or any(fnmatchcase(module, f"*.{pattern}") for pattern in plan):
                continue
            if parameter.shape != (head,) and parameter.shape[:1] in ((width,), (width // head,)):
                raise UserError(
                    f"mesh.tensor: there is no plan by which {name} of {kind} is cut, as what it belongs to is; set "
                    "it to 1, and raise mesh.fsdp"
                )


def _cut_colwise(module: Any, mesh: DeviceMesh) -> None:
    kind = type(module)
    if kind is FusedMaps:
        _shard(module, mesh, {"weight": 2, "bias": 1})
        module.forward = lambda x: fused(x, local(module.weight), local(module.bias))
    elif kind is Conv1D:
        _shard(module, mesh, {"weight": 1, "bias": 0})
        module.forward = lambda x: x @ local(module.weight) + local(module.bias)
    else:
        _shard(module, mesh, {"weight": 0, "bias": 0})
        module.forward = lambda x: F.linear(x, local(module.weight), local(module.bias))


def _cut_rowwise(module: Any, tensor: TensorGroup, mesh: DeviceMesh) -> None:
    is_conv = type(module) is Conv1D
    _shard(module, mesh, {"weight": 0 if is_conv else 1})

    def forward(x: torch.Tensor) -> torch.Tensor:
        weight = local(module.weight)
        y = tensor.leave(x @ weight if is_conv else F.linear(x, weight))
        return y if module.bias is None else y + module.bias

    module.forward = forward


def _cut_head(head: Any, mesh: DeviceMesh) -> None:
    """Each process makes the scores of its share of the vocabulary, as the model calls its head itself."""
    _shard(head, mesh, {"bias": 0} if getattr(head, "bias", None) is not None else {})
    head.forward = lambda x: F.linear(x, local(head.weight), local(head.bias))


def _cut_vocabulary(model: Any, tensor: TensorGroup, mesh: DeviceMesh) -> None:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied, vocab = head.weight is table.weight, len(table.weight)
    _shard(table, mesh, {"weight": 0})
    if tied:
        head.weight = table.weight
    else:
        _shard(head, mesh, {"weight": 0})
    first, last = share(vocab, tensor)
    scale, padding = getattr(table, "embed_scale", None), table.padding_idx
    here = padding - first if padding is not None and first <= padding < last else None

    def forward(ids_BT: torch.Tensor) -> torch.Tensor:
        rows_VD, here_BT = local(table.weight), ids_BT - first
        is_here_BT = (here_BT >= 0) & (here_BT < last - first)
        found_BTD = F.embedding(torch.where(is_here_BT, here_BT, 0), rows_VD, padding_idx=here)
        x_BTD = tensor.leave(torch.where(is_here_BT[..., None], found_BTD, 0.0))
        return x_BTD if scale is None else x_BTD * table.embed_scale.to(x_BTD.dtype)

    table.forward = forward


def _entering(tensor: TensorGroup) -> Callable[..., Any]:
    def enter(_: nn.Module, arguments: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if arguments:
            return (tensor.enter(arguments[0]), *arguments[1:]), named
        return arguments, {**named, "hidden_states": tensor.enter(named["hidden_states"])}

    return enter


def _shard(module: nn.Module, mesh: DeviceMesh, axes: dict[str, int]) -> None:
    for name, axis in axes.items():
        parameter = getattr(module, name)
        if parameter is None:
            continue
        size = parameter.shape[axis]
        each = -(-size // mesh.size())
        first = min(each * mesh.get_local_rank(), size)
        part = parameter.detach().narrow(axis, first, min(each, size - first)).contiguous()
        laid = DTensor.from_local(
            part, mesh, [Shard(axis)], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
        setattr(module, name, nn.Parameter(laid))
