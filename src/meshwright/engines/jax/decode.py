"""Text generation with a key-value cache of fixed shape: one prefill, then several tokens each time the host calls.

Shapes: B prompts, P padded prompt length, S cached positions, K tokens of a call, L layers, V vocabulary.

Prompts are padded on the right. Row `b` writes its next token at its own next position, over the padding, and looks
at no position beyond it; so rows of different lengths share a batch without seeing each other's padding.

What is slow about decoding is reading every parameter for every token. So before the first token the parameters are
laid out as a step reads them: a layer an array, and kernels in the type that they are multiplied in. While a text is
generated this takes as much memory as the parameters do in that type, which is less than a training step needs.
"""

import math
from collections.abc import Callable, Iterator
from copy import copy
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.engines.base import Sampling
from meshwright.engines.jax.pipeline import AXIS
from meshwright.engines.jax.program import OnMesh, Program
from meshwright.engines.jax.rules import ACTIVATIONS
from meshwright.engines.jax.sharding import specs_of
from meshwright.engines.prompts import check_prompts
from meshwright.models.layout import layout, use_layout
from meshwright.models.precision import is_multiplied
from meshwright.models.stacks import STACKS, unstack

_SHORTEST = 64  # prompt and cache lengths are rounded up to this or something larger, so that few shapes are compiled
_MOST = 16  # tokens of a call: few enough to be shown as they come, and enough for the host not to be waited for
_KINDS = (float, int, float, int)  # of a `Sampling`'s numbers: another kind would compile all anew

Way = Literal["likeliest", "drawn", "drawn of some"]


class Prepared(NamedTuple):
    """Parameters as a step reads them."""

    params: Any
    """Each stack of blocks is a list of layers, in order."""
    head: tuple[jax.Array, jax.Array | None] | None
    """The kernel and the bias of the head, where the kernel is the table of embeddings turned: that takes time."""


class Rows(NamedTuple):
    """Where the rows of a batch have got to."""

    token_B: jax.Array
    """The last token of each, which isn't in the cache yet."""
    ended_B: jax.Array
    """Whether that, or one before, was the one that ends a text; or there is no such prompt."""
    cache_L: list[Any]
    """Of each layer."""


class Generator:
    """Generates from a decoder; compiled functions are kept from call to call.

    Arguments:
        program: the run's; its model has `empty_cache` and `decode`.
    """

    def __init__(self, program: Program):
        self._program = program

    def __call__(
        self, params: Any, prompts: list[list[int]], max_tokens: int, stop: int, sampling: Sampling
    ) -> Iterator[list[int | None]]:
        """See `Engine.generate`.

        Raises:
            UserError: a prompt is empty, or a prompt and what is to come exceed the context length.
        """
        context = self._program.spec.context_length
        longest = check_prompts(prompts, max_tokens, context)
        if max_tokens < 1:
            return
        many = len(prompts)
        batch = max(-(-many // self._shares), _fewest_rows()) * self._shares
        lengths_B = np.array([len(prompt) for prompt in prompts] + [1] * (batch - many), np.int32)
        tokens_BP = np.zeros((batch, bucket(longest, context)), np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BP[row, : len(prompt)] = prompt
        way, numbers = way_of(sampling), Sampling(*(kind(x) for kind, x in zip(_KINDS, sampling, strict=True)))
        prepared, length = self._prepare(params), bucket(longest + max_tokens, context)
        tokens_KB, rows = self._prefill(
            prepared, tokens_BP, lengths_B, np.arange(batch) >= many, stop, numbers, length, way
        )
        count = written = 1
        ended = np.zeros(many, bool)
        while count:
            arrived_KB, arrived = tokens_KB, count
            most = _MOST if _in_one_go() else min(2 * count, _MOST)  # the first ones come soon
            count = min(most, max_tokens - written)
            if count:  # the device works on these while the ones before are shown
                positions_B = lengths_B + (written - 1)
                tokens_KB, rows = self._go_on(prepared, rows, positions_B, count, stop, numbers, way)
                written += count
            for chosen_B in np.asarray(arrived_KB)[:arrived, :many]:
                ended |= chosen_B == stop
                if ended.all():
                    return
                yield [None if done else int(token) for token, done in zip(chosen_B, ended, strict=True)]

    @property
    def _shares(self) -> int:
        return math.prod(self._program.mesh.sizes[axis] for axis in ACTIVATIONS["batch"])

    @cached_property
    def _prepare(self) -> OnMesh:
        program = self._program
        return program.compiled(_prepare(program), out_shardings=_prepared_shardings(program))

    @cached_property
    def _prefill(self) -> OnMesh:
        out = _outputs(self._program)
        return self._program.compiled(_prefill(self._program), ordered=True, static_argnums=(6, 7), out_shardings=out)

    @cached_property
    def _go_on(self) -> OnMesh:
        out = _outputs(self._program)
        return self._program.compiled(
            _go_on(self._program), ordered=True, static_argnums=6, donate_argnums=1, out_shardings=out
        )


def _fewest_rows() -> int:
    # Of a single row XLA for GPUs makes a product with a matrix by writing out all that it is the sum of.
    return 2 if jax.default_backend() == "gpu" else 1


def _in_one_go() -> bool:
    # A GPU would stand still while the host asks, after each token, whether that was the last. Some tokens too many at
    # the end cost less.
    return jax.default_backend() == "gpu"


def bucket(length: int, context: int) -> int:
    """The length rounded up to a power of two or one and a half times that, at most the context's."""
    power = _SHORTEST
    while power < length:
        power *= 2
    return min(power if power == _SHORTEST or length > power // 4 * 3 else power // 4 * 3, context)


def _prepare(program: Program) -> Callable[[Any], Prepared]:
    """What prepares parameters; a researcher's own are rounded too, unless they have less than two axes in a layer."""
    spec, order_L = program.spec, program.state.order_L

    def cast(path: tuple, leaf: jax.Array) -> jax.Array:
        multiplied = is_multiplied(path[-1].key, leaf.ndim, spec) and jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf.astype(program.dtype) if multiplied else leaf

    def prepare(params: Any) -> Prepared:
        prepared = dict(params)
        for name in STACKS & params.keys():
            prepared[name] = unstack(params[name])
        if order_L is not None:
            prepared["blocks"] = [prepared["blocks"][place] for place in np.argsort(order_L)]
        head = None
        if spec.tied_embeddings:
            kernel_DV, bias_V = nnx.merge(program.state.graph, params).head_weights()
            head = (kernel_DV.astype(program.dtype), bias_V)
        return Prepared(jax.tree_util.tree_map_with_path(cast, prepared), head)

    return prepare


def _prepared_shardings(program: Program) -> Prepared | None:
    """How they lie: as the run's, and where these are cut by layer, each layer is cut instead."""
    if program.state.shardings is None:
        return None
    shapes, shardings = program.state.shapes.params, dict(program.state.shardings.params)
    stages = program.mesh.sizes[AXIS]

    def of_layer(leaf: jax.ShapeDtypeStruct, sharding: NamedSharding) -> NamedSharding:
        entries = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))][1:]
        axes = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]
        for place, size in enumerate(leaf.shape[1:]):
            if stages > 1 and size % (stages * math.prod(program.mesh.sizes[axis] for axis in axes[place])) == 0:
                axes[place] = (*axes[place], AXIS)
                break
        return NamedSharding(sharding.mesh, PartitionSpec(*(along or None for along in axes)))

    for name in STACKS & shapes.keys():
        one = jax.tree.map(of_layer, shapes[name], shardings[name])
        shardings[name] = [one] * len(jax.tree.leaves(shapes[name])[0])
    head: Any = None
    if program.spec.tied_embeddings:
        cut = specs_of({"kernel": ("width", "vocab")}, program.mesh.sizes, program.spec)["kernel"]
        head = (program.mesh.sharding(cut), program.everywhere)
    return Prepared(shardings, head)


def _outputs(program: Program) -> Any:
    """How tokens and rows lie: tokens everywhere, caches cut by row and head."""
    if program.mesh.mesh is None:
        return None
    sizes = program.mesh.sizes
    everywhere: Any = program.everywhere

    def cached(leaf: jax.ShapeDtypeStruct) -> Any:
        names = ("batch", "heads", None, None) if len(leaf.shape) == 4 else ("batch",)
        entries = []
        for name, size in zip(names, leaf.shape, strict=False):
            along = tuple(axis for axis in ACTIVATIONS.get(name or "", ()) if sizes[axis] > 1)
            entries.append(along if along and size % math.prod(sizes[axis] for axis in along) == 0 else None)
        return program.mesh.sharding(PartitionSpec(*entries))

    def one_layer_each(params: Any) -> list[Any]:
        batch = math.prod(sizes[axis] for axis in ACTIVATIONS["batch"])
        return unstack(nnx.merge(program.state.graph, params).empty_cache(batch, 1, program.dtype))

    cache_L = jax.tree.map(cached, jax.eval_shape(one_layer_each, program.state.shapes.params))
    return everywhere, Rows(everywhere, everywhere, cache_L)


def _prefill(program: Program) -> Callable[..., tuple[jax.Array, Rows]]:
    def prefill(
        prepared: Prepared,
        tokens_BP: jax.Array,
        lengths_B: jax.Array,
        ended_B: jax.Array,
        stop: jax.Array,
        sampling: Sampling,
        length: int,
        way: Way,
    ) -> tuple[jax.Array, Rows]:
        """The token after each prompt, `[1, B]`, and what to go on from, with a cache of `length` positions."""
        with _one_kernel_a_product():
            model = prepared_model(program, prepared)
            positions_BP = jnp.broadcast_to(jnp.arange(tokens_BP.shape[1]), tokens_BP.shape)
            cache = model.empty_cache(len(tokens_BP), length, program.dtype)
            x_BPD, cache = model.decode(tokens_BP, positions_BP, cache, dtype=program.dtype, from_start=True)
            x_B1D = jnp.take_along_axis(x_BPD, lengths_B[:, None, None] - 1, axis=1)
            token_B = _choose(model, x_B1D, lengths_B - 1, sampling, way)
            return token_B[None], Rows(token_B, ended_B | (token_B == stop), unstack(cache))

    return prefill


def _go_on(program: Program) -> Callable[..., tuple[jax.Array, Rows]]:
    def go_on(
        prepared: Prepared,
        rows: Rows,
        positions_B: jax.Array,
        count: jax.Array,
        stop: jax.Array,
        sampling: Sampling,
        way: Way,
    ) -> tuple[jax.Array, Rows]:
        """The next `count` tokens of each row, or fewer where all have ended, of `[K, B]`; the rest doesn't count."""

        def one(carry: tuple) -> tuple:
            done, _, tokens_KB, (token_B, ended_B, cache_L) = carry
            # Tokens beyond `count` may have no place in the cache; they go where the last one went.
            model, position_B = prepared_model(program, prepared), positions_B + jnp.minimum(done, count - 1)
            x_B1D, cache = model.decode(token_B[:, None], position_B[:, None], _stack(cache_L), dtype=program.dtype)
            token_B = _choose(model, x_B1D, position_B, sampling, way)
            ended_B = ended_B | (token_B == stop)
            rows = Rows(token_B, ended_B, unstack(cache))
            return done + 1, ~ended_B.all(), tokens_KB.at[done].set(token_B), rows

        with _one_kernel_a_product():
            tokens_KB = jnp.zeros((_MOST, len(rows.token_B)), jnp.int32)
            carry = (jnp.zeros((), jnp.int32), ~rows.ended_B.all(), tokens_KB, rows)
            if _in_one_go():
                return jax.lax.fori_loop(0, _MOST, lambda _, carry: one(carry), carry)[2:]
            return jax.lax.while_loop(lambda carry: (carry[0] < count) & carry[1], one, carry)[2:]

    return go_on


def _one_kernel_a_product() -> Any:
    # To make one kernel of several takes longer than a step's product with it.
    apart = copy(layout())
    apart.fuse_linear = False
    return use_layout(apart)


def prepared_model(program: Program, prepared: Prepared) -> Any:
    """The model with these parameters, in a function that is traced."""
    params = dict(prepared.params)
    for name in STACKS & params.keys():
        params[name] = _stack(params[name])
    model = nnx.merge(program.state.graph, params)
    if prepared.head is not None:
        model.head_weights = lambda: prepared.head
    return model


def _stack(layers: list[Any]) -> Any:
    # The model takes its layers apart again, so that XLA does neither.
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def _choose(model: Any, x_B1D: jax.Array, position_B: jax.Array, sampling: Sampling, way: Way) -> jax.Array:
    token_B = sample(model.logits(x_B1D)[:, 0].astype(jnp.float32), position_B, sampling, way)
    return layout().place(token_B, None)


def way_of(sampling: Sampling) -> Way:
    """How tokens are chosen: each way is compiled by itself, since only one of them need sort the vocabulary."""
    if sampling.temperature <= 0:
        return "likeliest"
    return "drawn of some" if sampling.top_k > 0 or sampling.top_p < 1 else "drawn"


def sample(logits_BV: jax.Array, position_B: jax.Array, sampling: Sampling, way: Way) -> jax.Array:
    """Choose a token for each row.

    Top-k is applied first, then top-p (Holtzman et al., 2020) to what is left; the likeliest token always stays.

    Arguments:
        logits_BV: scores, float32.
        position_B: where the token before stands; with the seed and the row it makes the random key.
        sampling: its numbers may be traced, so that changing them compiles nothing.
        way: what `way_of` says of them.

    Returns:
        Token ids, `[B]`.
    """
    if way == "likeliest":
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    scaled_BV = logits_BV / jnp.maximum(sampling.temperature, 1e-6)
    if way == "drawn of some":
        scaled_BV = jnp.where(scaled_BV >= _least_allowed(scaled_BV, sampling), scaled_BV, -jnp.inf)
    fold = jax.vmap(jax.random.fold_in)
    keys_B = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.key(sampling.seed), jnp.arange(logits_BV.shape[0])
    )
    return jax.vmap(jax.random.categorical)(fold(keys_B, position_B), scaled_BV).astype(jnp.int32)


def _least_allowed(scaled_BV: jax.Array, sampling: Sampling) -> jax.Array:
    """The least score that top-k and top-p leave, `[B, 1]`."""
    sorted_BV = -jnp.sort(-scaled_BV, axis=-1)
    vocab = scaled_BV.shape[-1]
    rank_V = jnp.arange(vocab)
    k = jnp.where(sampling.top_k > 0, sampling.top_k, vocab)
    probs_BV = jax.nn.softmax(jnp.where(rank_V < k, sorted_BV, -jnp.inf), axis=-1)
    before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
    kept_BV = (rank_V < k) & ((before_BV < sampling.top_p) | (rank_V == 0))
    return jnp.take_along_axis(sorted_BV, kept_BV.sum(axis=-1, keepdims=True) - 1, axis=-1)
