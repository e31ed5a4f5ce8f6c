"""How parameters and activations lie on a mesh: the rules of `rules.py`, applied."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Layout as MemoryOrder
from jax.experimental.layout import with_layout_constraint
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshwright.engines.jax.experts import expert_parallel
from meshwright.engines.jax.manual import manual
from meshwright.engines.jax.mesh import RunMesh
from meshwright.engines.jax.ring import ring_attention, zigzag_order
from meshwright.engines.jax.rules import ACTIVATIONS, GATHERED, PARAMETERS
from meshwright.models import flash
from meshwright.models.attention import whole_attention, window_array
from meshwright.models.gradients import Scoring
from meshwright.models.layout import Layout
from meshwright.models.moe import ExpertKernels
from meshwright.models.precision import is_multiplied
from meshwright.models.spec import ModelSpec
from meshwright.models.stacks import STACKS

Axes = tuple[str | None, ...]


def axes_of(state: nnx.State) -> dict:
    """The names of the axes of each parameter, as nested dictionaries.

    Arguments:
        state: the parameters of a model, abstract or not; those of its stacks of blocks get a leading `layers`.
    """
    axes: dict = {}
    for path, variable in state.flat_state():
        *folders, name = path
        inner = axes
        for folder in folders:
            inner = inner.setdefault(folder, {})
        stacked = path[0] in STACKS
        unknown = (None,) * (variable.ndim - stacked)  # a researcher's own parameter may have no names
        inner[name] = ("layers",) * stacked + (variable.get_metadata().get("axes") or unknown)
    return axes


def specs_of(axes: dict, sizes: dict[str, int], spec: ModelSpec) -> Any:
    """How each parameter is cut, from the names of its axes."""
    return jax.tree.map(partial(_parameter_spec, sizes=sizes, spec=spec), axes, is_leaf=_is_axes)


def _is_axes(value: Any) -> bool:
    return isinstance(value, tuple)


def _parameter_spec(axes: Axes, sizes: dict[str, int], spec: ModelSpec) -> PartitionSpec:
    entries = []
    for name in axes:
        along = tuple(axis for axis in PARAMETERS.get(name or "", ()) if sizes[axis] > 1)
        if name == "kv_heads" and along and spec.kv_heads % sizes["tensor"]:
            along = ()  # fewer key-value heads than shares: a head is never cut, so each share has them all
        entries.append(along[0] if len(along) == 1 else (along or None))
    return PartitionSpec(*entries)


def padded_vocab(vocab_size: int, sizes: dict[str, int]) -> int:
    """Rows of the vocabulary's tables on a mesh: rounded up so that they can be cut."""
    return -(-vocab_size // sizes["tensor"]) * sizes["tensor"]


def pad_vocab(params: Any, axes: dict, rows: int) -> Any:
    """Parameters with zeros added where an axis is the vocabulary's, up to `rows`."""

    def pad(names: Axes, leaf: jax.Array) -> jax.Array:
        missing = [(0, rows - size if name == "vocab" else 0) for name, size in zip(names, leaf.shape, strict=True)]
        return jnp.pad(leaf, missing) if any(after for _, after in missing) else leaf

    return jax.tree.map(pad, axes, params, is_leaf=_is_axes)


def state_shardings(state: Any, params: Any, shardings: Any, rest: NamedSharding | None) -> Any:
    """How each array of a training state lies: one made after a parameter lies as it does.

    Arguments:
        state: abstract; what holds arrays of parameters' shapes under the parameters' own names.
        params: abstract parameters.
        shardings: theirs.
        rest: of what isn't made after a parameter, such as a counter.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    known = {
        _names(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True)
    }

    def choose(path: tuple, leaf: Any) -> NamedSharding | None:
        names = _names(path)
        for start in range(len(names)):
            shape, sharding = known.get(names[start:], (None, rest))
            if shape == leaf.shape:
                return sharding
        return rest

    return jax.tree_util.tree_map_with_path(choose, state)


def in_memory_order(tree: Any, shardings: Any) -> Any:
    """Arrays of a mesh, each in its devices' memory with its first axis outermost.

    Arguments:
        tree: the arrays.
        shardings: how they lie.
    """

    def local(tree: Any) -> Any:
        return jax.tree.map(lambda x: with_layout_constraint(x, MemoryOrder(tuple(range(x.ndim)))), tree)

    # By hand: XLA would gather some of the arrays to do it.
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    return jax.shard_map(local, in_specs=(specs,), out_specs=specs, check_vma=False)(tree)


def _names(path: tuple) -> tuple[str, ...]:
    return tuple(str(getattr(part, "key", getattr(part, "name", getattr(part, "idx", "")))) for part in path)


class MeshLayout(Layout):
    """The layout of a mesh of more than one device.

    Arguments:
        run_mesh: the mesh.
        spec: the architecture.
        ordered: whether columns lie in the order of their places, along the context axis too: as they do in
            decoding. Otherwise they lie in zig-zag order there.
    """

    def __init__(self, run_mesh: RunMesh, spec: ModelSpec, *, ordered: bool = False):
        self._sizes = run_mesh.sizes
        self._spec = spec
        self._context = 1 if ordered else run_mesh.sizes["context"]
        self.fuse_linear = run_mesh.sizes["tensor"] == 1
        self.on_mesh = True
        self.whole_vocab = run_mesh.sizes["tensor"] == 1

    def place(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """See `Layout.place`; an axis that its mesh axes don't divide is left as it is."""
        entries: list[tuple[str, ...] | None] = []
        for name, size in zip(axes, x.shape, strict=True):
            along = tuple(axis for axis in ACTIVATIONS.get(name or "", ()) if self._sizes[axis] > 1)
            while along and size % np.prod([self._sizes[axis] for axis in along]):
                along = along[:-1]
            entries.append(along or None)
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))

    def gather(self, params: Any, dtype: Any) -> Any:
        """See `Layout.gather`."""
        if all(self._sizes[axis] == 1 for axis in GATHERED):
            return params

        def one(path: tuple, variable: nnx.Variable) -> nnx.Variable:
            axes = variable.get_metadata().get("axes")
            if axes is None:
                return variable
            rounded = is_multiplied(_names(path)[-1], len(axes), self._spec)
            return variable.replace(self._gather(variable[...], axes, dtype if rounded else None))

        return jax.tree_util.tree_map_with_path(one, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def _gather(self, x: jax.Array, axes: Axes, dtype: Any) -> jax.Array:
        """A parameter, gathered along the axes in `GATHERED` in this type; its gradient is scattered again."""
        whole = {axis: 1 if axis in GATHERED else size for axis, size in self._sizes.items()}
        there, back = (_parameter_spec(axes, sizes, self._spec) for sizes in (whole, self._sizes))
        sent = dtype is not None and there != back and jnp.issubdtype(x.dtype, jnp.floating)
        return _relay(x, there, back, dtype if sent else x.dtype)

    def gather_kernel(self, kernel_DV: jax.Array, dtype: Any) -> jax.Array:
        """See `Layout.gather_kernel`."""
        return self._gather(kernel_DV, ("width", "vocab"), dtype)

    def gather_rows(self, dx: jax.Array, tokens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """See `Layout.gather_rows`: where they are less than the table's gradient, each device adds up all of them."""
        sent, table = tokens.size * dx.dtype.itemsize, rows * np.dtype(np.float32).itemsize
        if self._sizes["tensor"] > 1 or sent >= table:
            return dx, tokens
        return self.place(dx, *(None,) * tokens.ndim, "width"), self.place(tokens, *(None,) * tokens.ndim)

    def order_T(self, time: int) -> jax.Array:
        """See `Layout.order_T`."""
        return jnp.arange(time) if self._context == 1 else jnp.asarray(zigzag_order(time, self._context))

    def to_columns(self, x: jax.Array, axis: int) -> jax.Array:
        """See `Layout.to_columns`."""
        return x if self._context == 1 else jnp.take(x, self.order_T(x.shape[axis]), axis=axis)

    def kv_copies(self, kv_heads: int) -> int:
        """See `Layout.kv_copies`: as many as make the heads divide among the shares."""
        return int(np.lcm(kv_heads, self._sizes["tensor"])) // kv_heads

    def attention(
        self,
        q_BTHC: jax.Array,
        k_BTKC: jax.Array,
        v_BTKE: jax.Array,
        segments_BT: jax.Array | None,
        window: jax.Array | int | None,
        scoring: Scoring,
    ) -> jax.Array:
        """See `Layout.attention`: a ring, where sequences are cut."""
        if self._context > 1:
            return ring_attention(q_BTHC, k_BTKC, v_BTKE, segments_BT, window_array(window), scoring)
        rows, heads = ACTIVATIONS["batch"], ACTIVATIONS["heads"]
        many = math.prod(self._sizes[axis] for axis in rows)
        arguments = q_BTHC, k_BTKC, v_BTKE, segments_BT, window, scoring
        free = set(self._sizes) - {*rows, *heads} - _manual_axes()
        cut_otherwise = any(self._sizes[axis] > 1 for axis in free)
        if q_BTHC.shape[0] % many or cut_otherwise or not flash.applies(*arguments):
            return super().attention(*arguments)
        return self._fused_attention(rows, heads, *arguments)

    def _fused_attention(
        self,
        rows: tuple[str, ...],
        heads: tuple[str, ...],
        q_BTHC: jax.Array,
        k_BTKC: jax.Array,
        v_BTKE: jax.Array,
        segments_BT: jax.Array | None,
        window: Any,
        scoring: Scoring,
    ) -> jax.Array:
        # XLA can't cut a kernel that isn't its own: each device calls it for its rows and heads.
        def local(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
            # Integers come as float32, which holds them exactly.
            whole = segments[0].astype(jnp.int32) if segments else None
            return whole_attention(q, k, v, whole, window, scoring)

        # In a region that leaves an axis to XLA, even one of size 1, XLA crashes on cuDNN's calls.
        rows = (*rows, *sorted(set(self._sizes) - {*rows, *heads} - _manual_axes()))
        spec = PartitionSpec(rows, None, heads)
        segments: tuple[jax.Array, ...] = ()
        if segments_BT is not None:
            segments = (jnp.broadcast_to(segments_BT, q_BTHC.shape[:2]).astype(jnp.float32),)
        in_specs = (spec, spec, spec, *(PartitionSpec(rows) for _ in segments))
        attend = manual(local, in_specs, spec, (*rows, *heads))
        if self._sizes["pipeline"] > 1:  # XLA crashes where what cuDNN keeps goes from one loop over ticks to another
            attend = jax.checkpoint(attend)
        return attend(q_BTHC, k_BTKC, v_BTKE, *segments)

    def experts(
        self, x_BTD: jax.Array, chosen_BTJ: jax.Array, gates_BTJ: jax.Array, kernels: ExpertKernels
    ) -> jax.Array:
        """See `Layout.experts`: tokens travel to their experts and back."""
        return expert_parallel(x_BTD, chosen_BTJ, gates_BTJ, kernels)

    def on_one_device(self) -> bool:
        """See `Layout.on_one_device`."""
        return {axis for axis, size in self._sizes.items() if size > 1} <= _manual_axes()

    def rows_are_whole(self, batch: int) -> bool:
        """See `Layout.rows_are_whole`."""
        along = {axis for axis, size in self._sizes.items() if size > 1}
        return along <= set(ACTIVATIONS["batch"]) and batch % math.prod(self._sizes.values()) == 0

    def by_rows(self, f: Callable[..., Any], rows: tuple[jax.Array, ...], whole: tuple[jax.Array, ...]) -> Any:
        """See `Layout.by_rows`."""
        axes = ACTIVATIONS["batch"]
        in_specs = (*(PartitionSpec(axes) for _ in rows), *(PartitionSpec() for _ in whole))
        cut = jax.shard_map(f, in_specs=in_specs, out_specs=PartitionSpec(axes), axis_names=set(axes), check_vma=False)
        return cut(*rows, *whole)

    def by_sequence(self, f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """See `Layout.by_sequence`: each device works on its own, which XLA can't always be trusted to find out."""
        axes = ACTIVATIONS["batch"]
        if arrays[0].shape[0] % math.prod(self._sizes[axis] for axis in axes):
            return f(*arrays)
        spec = PartitionSpec(axes)
        return manual(f, (spec,) * len(arrays), spec, axes)(*arrays)


def _manual_axes() -> set[str]:
    """Of the mesh, those that the function that is traced is cut along by hand."""
    mesh = jax.sharding.get_abstract_mesh()
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _relay(x: jax.Array, there: PartitionSpec, back: PartitionSpec, dtype: Any) -> jax.Array:
    # The type that it is used in is half as much to send; to round it before or after is the same.
    return jax.lax.with_sharding_constraint(x.astype(dtype), there).astype(x.dtype)


def _relay_forward(x: jax.Array, there: PartitionSpec, back: PartitionSpec, dtype: Any) -> tuple[jax.Array, None]:
    return _relay(x, there, back, dtype), None


def _relay_backward(there: PartitionSpec, back: PartitionSpec, dtype: Any, _: None, dx: jax.Array) -> tuple[jax.Array]:
    # First as it was used: the gradient of a table would else be summed up piece by piece of its width.
    return (jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(dx, there), back),)


_relay.defvjp(_relay_forward, _relay_backward)
