"""Causal attention over sequences that are cut along the mesh axis "context".

Keys and values go round the shards in a ring (Liu et al., 2023, "Ring Attention with Blockwise Transformers"), while
each shard keeps its queries. The softmax is put together block by block, and the gradient makes the weights anew from
the log-sum-exp of the scores (Dao et al., 2022, "FlashAttention").

The sequence is cut into 2n chunks for n shards, and shard i holds two of them (the zig-zag order; Grattafiori et al.,
2024, "The Llama 3 Herd of Models"): chunk i, its low one, and chunk 2n-1-i, its high one. So chunks 0 to n-1 are the
low ones, n to 2n-1 the high ones, and the queries of shard i see of the keys of shard j

- from the high chunk, the low one: all of it;
- from the low chunk, the low one: all of it where j < i, up to the query itself where j = i;
- from the high chunk, the high one: all of it where j > i, up to the query itself where j = i;
- from the low chunk, the high one: nothing.

Hence the keys of another shard cost two products of chunks on every shard, half of what is there: high with low, and
one more, low with low or high with high. Only a shard's own keys need a causal mask. A window, which leaves out keys
too far before the query, is a mask on all of them.

Shapes: B batch, T columns in time, H heads, K key-value heads, G = H / K, C head width, E width of a head's values,
Z = 2 the chunks of a shard (low, high), S the keys of a chunk, R = G S its queries of a group, one head after another.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from meshwright.models.gradients import Scoring, capped

_ROWS, _RING, _HEADS = ("data", "fsdp", "expert"), "context", "tensor"
_AXES = {*_ROWS, _RING, _HEADS}
_LOW, _HIGH = 0, 1
_MASKED = float(np.finfo(np.float32).min)

_Tree = TypeVar("_Tree")


# What a shard holds of its two chunks. `_chunk` gives the same of one of them, without the axis Z.


class _Queries(NamedTuple):
    q_ZBKRC: jax.Array  # scaled
    segments_ZBR: jax.Array | None
    places_ZR: jax.Array | None  # in the sequence; where there is a window


class _Keys(NamedTuple):
    k_ZBKSC: jax.Array
    v_ZBKSE: jax.Array
    segments_ZBS: jax.Array | None
    places_ZS: jax.Array | None  # they travel along


class _Rules(NamedTuple):
    # How a query and a key make a score.
    scoring: Scoring
    window: jax.Array | None


class _Softmax(NamedTuple):
    """Over the keys met so far; the output isn't divided by the total yet."""

    highest_ZBKR1: jax.Array
    total_ZBKR1: jax.Array
    y_ZBKRE: jax.Array


class _Upstream(NamedTuple):
    """What the gradient needs of each query's output, beside the query."""

    dy_ZBKRE: jax.Array
    along_ZBKR1: jax.Array  # the product of output and its gradient
    lse_ZBKR1: jax.Array


class _Gradients(NamedTuple):
    """All float32."""

    dq_ZBKRC: jax.Array
    dk_ZBKSC: jax.Array
    dv_ZBKSE: jax.Array


def zigzag_order(time: int, shards: int) -> np.ndarray:
    """The order of columns that `ring_attention` works in (Grattafiori et al., 2024, section 3.3.2).

    Arguments:
        time: length of the sequence, a multiple of `2 * shards`.
        shards: size of the mesh axis "context".

    Returns:
        `[T]`: the place in the sequence that each column holds.

    Raises:
        ValueError: the sequence can't be cut into `2 * shards` chunks.
    """
    if time % (2 * shards):
        raise ValueError(f"a sequence of {time} can't be cut into 2 chunks for each of {shards} shards")
    low = np.arange(shards)
    chunks = np.stack([low, 2 * shards - 1 - low], axis=1).reshape(-1)
    return np.arange(time).reshape(2 * shards, -1)[chunks].reshape(-1)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def ring_attention(
    q_BTHC: jax.Array,
    k_BTKC: jax.Array,
    v_BTKE: jax.Array,
    segments_BT: jax.Array | None,
    window: jax.Array | None = None,
    scoring: Scoring | None = None,
) -> jax.Array:
    """Causal softmax attention, the sequence cut along the mesh axis "context" (Liu et al., 2023).

    Global arrays in and out, with columns in `zigzag_order`, under `jax.set_mesh`; also within a map over other axes,
    a scan or a checkpoint. Batches lie along "data", "fsdp" and "expert", heads along "tensor". Scores, softmax and
    sums are float32. Kept for the gradient: the arguments, the output and a number for each query and head.

    Arguments:
        q_BTHC, k_BTKC, v_BTKE: queries, keys and values; head `h` uses key-value head `h // G`.
        segments_BT: integers; a query sees the keys of its own segment only. None: all are of one.
        window: how many places a query sees, its own included, `[]`; None: all before it.
        scoring: None: the usual scale, one over the root of C, and no bound.

    Returns:
        `[B, T, H, E]`, of the type of the values.
    """
    return _forward(q_BTHC, k_BTKC, v_BTKE, segments_BT, window, scoring)[0]


def _forward(q_BTHC, k_BTKC, v_BTKE, segments_BT, window, scoring):
    scoring = scoring or Scoring(q_BTHC.shape[-1] ** -0.5)
    arguments = q_BTHC, k_BTKC, v_BTKE, segments_BT, window
    y_BTHE, lse_BTH = _on_shards(partial(_forward_shard, scoring), "hhhtn", "hh")(*arguments)
    return y_BTHE, (*arguments, y_BTHE, lse_BTH)


def _backward(scoring, kept, dy_BTHE):
    scoring = scoring or Scoring(kept[0].shape[-1] ** -0.5)
    return *_on_shards(partial(_backward_shard, scoring), "hhhtnhhh", "hhh")(*kept, dy_BTHE), None, None


ring_attention.defvjp(_forward, _backward)


def _on_shards(f: Callable[..., Any], arguments: str, results: str) -> Callable[..., Any]:
    # Everything is cut in the same way; "h": an array with heads, "t": one without, "n": a number.
    specs = {"h": PartitionSpec(_ROWS, _RING, _HEADS), "t": PartitionSpec(_ROWS, _RING), "n": PartitionSpec()}
    in_specs, out_specs = (tuple(specs[kind] for kind in kinds) for kinds in (arguments, results))
    return jax.shard_map(f, in_specs=in_specs, out_specs=out_specs, axis_names=_AXES, check_vma=False)


def _forward_shard(scoring, q_BTHC, k_BTKC, v_BTKE, segments_BT, window):
    rules = _Rules(scoring, window)
    queries, keys = _queries_and_keys(q_BTHC, k_BTKC, v_BTKE, segments_BT, rules)

    def meet(softmax: _Softmax, keys: _Keys, mine: Any, theirs: Any, causal: bool) -> _Softmax:
        met = _include(_chunk(softmax, mine), _chunk(queries, mine), _chunk(keys, theirs), causal, rules)
        return _with_chunk(softmax, met, mine)

    softmax = _round_the_ring(meet, _nothing(queries, keys), keys)
    y_ZBKRE = softmax.y_ZBKRE / softmax.total_ZBKR1
    lse_ZBKR1 = softmax.highest_ZBKR1 + jnp.log(softmax.total_ZBKR1)
    time = q_BTHC.shape[1]
    return _columns(y_ZBKRE, time).astype(v_BTKE.dtype), _columns(lse_ZBKR1, time)[..., 0]


def _backward_shard(scoring, q_BTHC, k_BTKC, v_BTKE, segments_BT, window, y_BTHE, lse_BTH, dy_BTHE):
    rules, kv_heads = _Rules(scoring, window), k_BTKC.shape[2]
    queries, keys = _queries_and_keys(q_BTHC, k_BTKC, v_BTKE, segments_BT, rules)
    along_BTH = (dy_BTHE.astype(jnp.float32) * y_BTHE.astype(jnp.float32)).sum(axis=-1)
    rows = (_chunks(x, kv_heads) for x in (dy_BTHE, along_BTH[..., None], lse_BTH[..., None]))
    upstream = _Upstream(*rows)

    def meet(sums: _Gradients, keys: _Keys, mine: Any, theirs: Any, causal: bool) -> _Gradients:
        new = _pull_back(_chunk(queries, mine), _chunk(upstream, mine), _chunk(keys, theirs), causal, rules)
        chunks = _Gradients(mine, theirs, theirs)
        return _Gradients(*(_with_chunk(s, _chunk(s, c) + x, c) for s, x, c in zip(sums, new, chunks, strict=True)))

    def with_keys(sums: _Gradients) -> _Gradients:
        return _Gradients(sums.dq_ZBKRC, *_hand_on((sums.dk_ZBKSC, sums.dv_ZBKSE)))

    zeros = (jnp.zeros(x.shape, jnp.float32) for x in (queries.q_ZBKRC, keys.k_ZBKSC, keys.v_ZBKSE))
    sums = _round_the_ring(meet, _Gradients(*zeros), keys, with_keys)
    sums = with_keys(sums)  # the last step home
    time = q_BTHC.shape[1]
    return (
        _columns(sums.dq_ZBKRC * scoring.scale, time).astype(q_BTHC.dtype),
        _columns(sums.dk_ZBKSC, time).astype(k_BTKC.dtype),
        _columns(sums.dv_ZBKSE, time).astype(v_BTKE.dtype),
    )


# The ring. Each shard hands its keys on to the next one, so at step s shard i holds those of shard j = (i - s) mod n:
# j < i where i >= s. The pairs of chunks are those of the module's docstring.


def _round_the_ring(
    meet: Callable[[_Tree, _Keys, Any, Any, bool], _Tree],
    carry: _Tree,
    keys: _Keys,
    go_along: Callable[[_Tree], _Tree] = lambda carry: carry,
) -> _Tree:
    # `meet(carry, keys, mine, theirs, causal)` takes in one pair of chunks; `go_along` hands on what of the carry
    # belongs to the keys.
    shards = jax.lax.axis_size(_RING)

    def arrived(carry: _Tree, keys: _Keys, step: Any) -> _Tree:
        same = jnp.where(jax.lax.axis_index(_RING) >= step, _LOW, _HIGH)
        carry = meet(go_along(carry), keys, same, same, False)
        return meet(carry, keys, _HIGH, _LOW, False)

    def arrived_and_more_to_come(step: Any, state: tuple[_Tree, _Keys]) -> tuple[_Tree, _Keys]:
        carry, keys = state
        following = _hand_on(keys)  # under way while these are worked with
        return arrived(carry, keys, step), following

    for chunk in (_LOW, _HIGH):
        carry = meet(carry, keys, chunk, chunk, True)
    carry = meet(carry, keys, _HIGH, _LOW, False)
    if shards == 1:
        return carry
    carry, keys = jax.lax.fori_loop(1, shards - 1, arrived_and_more_to_come, (carry, _hand_on(keys)))
    return arrived(carry, keys, shards - 1)


def _hand_on(tree: _Tree) -> _Tree:
    shards = jax.lax.axis_size(_RING)
    to_next = [(shard, (shard + 1) % shards) for shard in range(shards)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, _RING, to_next), tree)


# What is done with one chunk of queries and one of keys.


def _scores(queries: _Queries, keys: _Keys, causal: bool, rules: _Rules) -> tuple[jax.Array, jax.Array | None]:
    products_BKRS = _product("...RC,...SC->...RS", queries.q_ZBKRC, keys.k_ZBKSC)
    scores_BKRS, slope_BKRS = capped(products_BKRS, rules.scoring.softcap)
    if causal:
        rows, length = scores_BKRS.shape[-2:]
        seen_RS = jnp.tile(jnp.tril(jnp.ones((length, length), bool)), (rows // length, 1))
        scores_BKRS = jnp.where(seen_RS, scores_BKRS, _MASKED)
    if queries.segments_ZBR is not None and keys.segments_ZBS is not None:
        seen_B1RS = queries.segments_ZBR[..., None, :, None] == keys.segments_ZBS[..., None, None, :]
        scores_BKRS = jnp.where(seen_B1RS, scores_BKRS, _MASKED)
    if rules.window is not None and queries.places_ZR is not None and keys.places_ZS is not None:
        seen_RS = queries.places_ZR[:, None] - keys.places_ZS < rules.window
        scores_BKRS = jnp.where(seen_RS, scores_BKRS, _MASKED)
    return scores_BKRS, slope_BKRS


def _nothing(queries: _Queries, keys: _Keys) -> _Softmax:
    rows, values = queries.q_ZBKRC.shape[:-1], keys.v_ZBKSE.shape[-1]
    highest = jnp.full((*rows, 1), _MASKED, jnp.float32)
    return _Softmax(highest, jnp.zeros_like(highest), jnp.zeros((*rows, values), jnp.float32))


def _include(softmax: _Softmax, queries: _Queries, keys: _Keys, causal: bool, rules: _Rules) -> _Softmax:
    # Each query has met itself, with its like, before it meets a chunk of which it may see nothing. So its highest
    # score is a real one there, and masked scores weigh exp(-huge) = 0.
    (scores_BKRS, _), v_BKSE = _scores(queries, keys, causal, rules), keys.v_ZBKSE
    highest = jnp.maximum(softmax.highest_ZBKR1, scores_BKRS.max(axis=-1, keepdims=True))
    weights_BKRS, shrink = jnp.exp(scores_BKRS - highest), jnp.exp(softmax.highest_ZBKR1 - highest)
    y_BKRE = _product("...RS,...SE->...RE", weights_BKRS.astype(v_BKSE.dtype), v_BKSE)
    total = softmax.total_ZBKR1 * shrink + weights_BKRS.sum(axis=-1, keepdims=True)
    return _Softmax(highest, total, softmax.y_ZBKRE * shrink + y_BKRE)


def _pull_back(queries: _Queries, upstream: _Upstream, keys: _Keys, causal: bool, rules: _Rules) -> _Gradients:
    # That of the queries is of the scaled ones.
    q, k, v = queries.q_ZBKRC, keys.k_ZBKSC, keys.v_ZBKSE
    scores_BKRS, slope_BKRS = _scores(queries, keys, causal, rules)
    weights_BKRS = jnp.exp(scores_BKRS - upstream.lse_ZBKR1)
    d_weights_BKRS = _product("...RE,...SE->...RS", upstream.dy_ZBKRE, v)
    d_scores_BKRS = weights_BKRS * (d_weights_BKRS - upstream.along_ZBKR1)
    d_scores_BKRS = (d_scores_BKRS if slope_BKRS is None else d_scores_BKRS * slope_BKRS).astype(q.dtype)
    return _Gradients(
        _product("...RS,...SC->...RC", d_scores_BKRS, k),
        _product("...RS,...RC->...SC", d_scores_BKRS, q),
        _product("...RS,...RE->...SE", weights_BKRS.astype(v.dtype), upstream.dy_ZBKRE),
    )


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.float32)


# From columns to chunks and back. The columns of a shard are its low chunk, then its high one.


def _queries_and_keys(
    q_BTHC: jax.Array, k_BTKC: jax.Array, v_BTKE: jax.Array, segments_BT: jax.Array | None, rules: _Rules
) -> tuple[_Queries, _Keys]:
    kv_heads = k_BTKC.shape[2]
    group, length = q_BTHC.shape[2] // kv_heads, q_BTHC.shape[1] // 2
    q_ZBKRC = _chunks(q_BTHC * rules.scoring.scale, kv_heads)
    segments_ZBR = segments_ZBS = places_ZR = places_ZS = None
    if segments_BT is not None:
        segments_ZBS = _segment_chunks(segments_BT)
        segments_ZBR = jnp.tile(segments_ZBS, (1, 1, group))
    if rules.window is not None:
        here, shards = jax.lax.axis_index(_RING), jax.lax.axis_size(_RING)
        places_ZS = jnp.stack([here, 2 * shards - 1 - here])[:, None] * length + jnp.arange(length)
        places_ZR = jnp.tile(places_ZS, (1, group))
    keys = _Keys(_chunks(k_BTKC, kv_heads), _chunks(v_BTKE, kv_heads), segments_ZBS, places_ZS)
    return _Queries(q_ZBKRC, segments_ZBR, places_ZR), keys


def _segment_chunks(segments_BT: jax.Array) -> jax.Array:
    batch, time = segments_BT.shape
    return segments_BT.reshape(batch, 2, time // 2).swapaxes(0, 1)


def _chunks(x_BTHC: jax.Array, kv_heads: int) -> jax.Array:
    """`[Z, B, K, R, C]`; of keys and values, whose heads are the groups, `[Z, B, K, S, C]`."""
    batch, time, heads, width = x_BTHC.shape
    group, length = heads // kv_heads, time // 2
    x_BZSKGC = x_BTHC.reshape(batch, 2, length, kv_heads, group, width)
    return x_BZSKGC.transpose(1, 0, 3, 4, 2, 5).reshape(2, batch, kv_heads, group * length, width)


def _columns(x_ZBKRC: jax.Array, time: int) -> jax.Array:
    """`[B, T, H, C]`: undoes `_chunks`."""
    _, batch, kv_heads, rows, width = x_ZBKRC.shape
    length = time // 2
    x_ZBKGSC = x_ZBKRC.reshape(2, batch, kv_heads, rows // length, length, width)
    return x_ZBKGSC.transpose(1, 0, 4, 2, 3, 5).reshape(batch, time, -1, width)


def _chunk(tree: _Tree, chunk: Any) -> _Tree:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, chunk, keepdims=False), tree)


def _with_chunk(tree: _Tree, new: _Tree, chunk: Any) -> _Tree:
    return jax.tree.map(lambda x, part: jax.lax.dynamic_update_index_in_dim(x, part, chunk, 0), tree, new)
