"""Parameters from a Hugging Face checkpoint, straight onto the devices, and back to the host tensor by tensor.

Shapes: L layers, E experts, V vocabulary.

A parameter of ours is made of many tensors of theirs, one a layer and expert. Each device's share of it is put
together on the host from the parts of those tensors that lie in it, and nothing else is read; so the host holds one
share at a time, and each device its own.
"""

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from meshwright.config import Run
from meshwright.config_train import MESH_AXES
from meshwright.engines.jax.mesh import RunMesh
from meshwright.engines.jax.state import StatePlan, plan_state
from meshwright.engines.jax.step import Params
from meshwright.errors import UserError
from meshwright.hub.reader import Checkpoint
from meshwright.hub.theirs import Tensor, tensors_of
from meshwright.models.decoder import Decoder
from meshwright.models.hf import family_of, tensor_name, unread_tensors, weights
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, one_more, present, same

if TYPE_CHECKING:
    from meshwright.engines.jax.program import Program

_BY_ELEMENT = (same, one_more)
_NAMED = 5


def read_params(checkpoint: Checkpoint, spec: ModelSpec, plan: StatePlan) -> Params:
    """The parameters of a checkpoint, each array lying as the plan says.

    Arguments:
        checkpoint: an open one.
        spec: the architecture, as the checkpoint's `config.json` says it but for keys that change no parameter.
        plan: of the state that they are to be part of.

    Raises:
        UserError: a tensor is missing, of a wrong shape or type, or isn't used, or a parameter isn't filled.
    """
    reading = _Reading(checkpoint, spec, plan)
    flat, structure = jax.tree_util.tree_flatten_with_path(plan.shapes.params)
    shardings = [None] * len(flat) if plan.shardings is None else jax.tree.leaves(plan.shardings.params)
    arrays = [reading.array(name_of(path), sharding) for (path, _), sharding in zip(flat, shardings, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def name_of(path: tuple) -> str:
    """The dotted path of a parameter, as rules write it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def real_shapes(plan: StatePlan, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its dotted path, without what pads the vocabulary."""
    axes, _ = jax.tree_util.tree_flatten_with_path(plan.axes, is_leaf=lambda value: isinstance(value, tuple))
    shapes = jax.tree.leaves(plan.shapes.params)
    return {
        name_of(path): tuple(
            spec.vocab_size if name == "vocab" else size for name, size in zip(names, leaf.shape, strict=True)
        )
        for (path, names), leaf in zip(axes, shapes, strict=True)
    }


def logits_of(checkpoint: Checkpoint, spec: ModelSpec, run: Run, tokens_BT: np.ndarray) -> np.ndarray:
    """The scores of a fresh model on one device, made of a checkpoint, `[B, T, V]` float32.

    Arguments:
        checkpoint: an open one.
        spec: what its `config.json` says.
        run: a run file; the seed is read.
        tokens_BT: token ids.
    """
    alone = RunMesh(dict.fromkeys(MESH_AXES, 1), None, 1)
    plan = plan_state(Decoder, spec, run, alone, optax.identity())
    params = read_params(checkpoint, spec, plan)
    return np.asarray(jax.jit(make_logits(plan))(params, jnp.asarray(tokens_BT)))


def make_logits(plan: StatePlan, dtype: str = "float32") -> Callable[[Params, jax.Array], jax.Array]:
    """A function of `(params, tokens_BT)` to scores, `[B, T, V]`, computed in float32 at full precision.

    Arguments:
        plan: of the state that the parameters are part of.
        dtype: what the parameters are rounded to before.
    """

    def logits(params: Params, tokens_BT: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(jnp.float32), plan.in_order(params))
        with jax.default_matmul_precision("highest"):
            return nnx.merge(plan.graph, params)(tokens_BT)

    return logits


class HostParameters:
    """The parameters of a run on the host, one slice at a time; see `meshwright.hub.export.Parameters`.

    Arguments:
        params: on their devices, which are all of this process.
        spec, plan: of the model and its state.
        program: the run's compiled functions.
    """

    def __init__(self, params: Params, spec: ModelSpec, program: "Program"):
        self.shapes = real_shapes(program.state, spec)
        """Of each parameter by its dotted path."""
        self._leaves = {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]}
        self._order_L = program.state.order_L
        self._at = program.compiled(_at, out_shardings=program.everywhere)

    def read(self, path: str, index: tuple[int, ...]) -> np.ndarray:
        """A parameter, or its slice at places along its first axes, float32."""
        if index and self._order_L is not None and path.startswith("blocks."):
            index = (int(np.flatnonzero(self._order_L == index[0])[0]), *index[1:])
        value = np.asarray(self._at(self._leaves[path], np.array(index, np.int32)))
        return value[tuple(slice(0, size) for size in self.shapes[path][len(index) :])]


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    # With an index that is traced, all layers share one compiled function.
    for place in index:
        x = jax.lax.dynamic_index_in_dim(x, place, keepdims=False)
    return x


class _Reading:
    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, plan: StatePlan):
        self._checkpoint, self._plan = checkpoint, plan
        self._shapes = real_shapes(plan, spec)
        self._padded = {
            name_of(path): leaf.shape for path, leaf in jax.tree_util.tree_flatten_with_path(plan.shapes.params)[0]
        }
        family, names = family_of(checkpoint.config), set(checkpoint.names)
        rules = present(weights(spec), lambda name: tensor_name(name, names, family) is not None)
        self._rules = {rule.ours: rule for rule in rules}
        if unfilled := sorted(self._shapes.keys() ^ self._rules.keys()):
            raise UserError(
                f"model.family = {spec.family!r}: has no rule for {_several(unfilled)}; a model of one's own parts has "
                "no Hugging Face form"
            )
        tensors = tensors_of(rules, self._shapes)
        self._named = {tensor.name: tensor_name(tensor.name, names, family) for tensor in tensors}
        if missing := [name for name, found in self._named.items() if found is None]:
            raise UserError(f"{checkpoint.folder}: lacks {_several(missing)}; give a whole checkpoint")
        if unread := unread_tensors(names, rules, family, spec):
            raise UserError(
                f"{checkpoint.folder}: holds {_several(unread)}, which the family {spec.family} has no use for; "
                "the model would not be the one that was saved"
            )
        self._check_shapes(tensors)

    def array(self, ours: str, sharding: Any) -> jax.Array:
        """A parameter on its devices."""
        shape = self._padded[ours]
        if sharding is None:
            return jax.device_put(self._share(ours, _whole(shape)), may_alias=False)
        by_share: dict[tuple, list[jax.Device]] = {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            share = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
            by_share.setdefault(share, []).append(device)
        shards = []
        for share, devices in by_share.items():
            values = self._share(ours, share)
            shards += [jax.device_put(values, device, may_alias=False) for device in devices]
            jax.block_until_ready(shards[-len(devices) :])  # before the host makes room for the next
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _share(self, ours: str, share: tuple[tuple[int, int], ...]) -> np.ndarray:
        rule, shape = self._rules[ours], self._shapes[ours]
        values = np.zeros([last - first for first, last in share], np.float32)
        stacked, cut = share[: rule.stacked], share[rule.stacked :]
        cut = tuple((min(a, size), min(b, size)) for (a, b), size in zip(cut, shape[rule.stacked :], strict=True))
        there = tuple(slice(0, last - first) for first, last in cut)  # what is beyond pads the vocabulary
        for place in product(*(range(first, last) for first, last in stacked)):
            at = tuple(number - first for number, (first, _) in zip(place, stacked, strict=True))
            values[at + there] = self._slice(rule, rule.name(self._numbers(ours, place)), cut)
        return values

    def _numbers(self, ours: str, place: tuple[int, ...]) -> tuple[int, ...]:
        if self._plan.order_L is None or not ours.startswith("blocks."):
            return place
        return (int(self._plan.order_L[place[0]]), *place[1:])

    def _slice(self, rule: Rule, theirs: str, cut: tuple[tuple[int, int], ...]) -> np.ndarray:
        name = self._named[theirs]
        assert name is not None
        axes = _axes(rule, len(cut))
        if axes is None:
            return rule.read(self._checkpoint.read(name))[tuple(slice(first, last) for first, last in cut)]
        index = [slice(*cut[axes.index(axis)]) for axis in range(len(cut))]
        if rule.part is not None:
            there, start = index[rule.axis], rule.part.start or 0
            index[rule.axis] = slice(start + there.start, start + there.stop)
        return rule.to_ours(self._checkpoint.read(name, tuple(index)))

    def _check_shapes(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            name = self._named[tensor.name] or tensor.name
            if (found := self._checkpoint.shape(name)) != tensor.shape:
                raise UserError(
                    f"{self._checkpoint.folder}: {name} is of shape {found}, where its config.json asks for "
                    f"{tensor.shape}; give the config.json that was saved with it"
                )


def _axes(rule: Rule, count: int) -> tuple[int, ...] | None:
    """Which axis of their tensor each axis of our slice is; None: the rule does more than to turn it."""
    if rule.heads:
        return None
    if rule.to_ours in _BY_ELEMENT:
        return tuple(range(count))
    probe = np.empty((2, 3, 5)[:count], np.float32)
    try:
        seen = rule.to_ours(probe)
    except ValueError:
        return None  # it needs an array of the right size
    same_place = seen.__array_interface__["data"] == probe.__array_interface__["data"]
    if not same_place or sorted(seen.strides) != sorted(probe.strides):
        return None
    return tuple(probe.strides.index(stride) for stride in seen.strides)


def _several(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _whole(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in shape)
