"""Which experts a token passes, with which weights, and what that costs.

Shapes: B batch, T time, E experts, J choices of a token, G groups of experts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from meshwright.models.spec import ModelSpec

UNTRAINED = "router_bias"
"""The name of the parameter that no gradient reaches, and that no optimizer may change."""


class Routing(NamedTuple):
    """What the router of a layer did, as sums over tokens: those of the parts of a batch add up to those of the batch.

    Each token counts as much as its weight (`Places.weights_BT`).
    """

    penalty: jax.Array
    """The losses of the router, as a sum over tokens; float32. The loss of a batch has it divided by its tokens."""
    load_E: jax.Array
    """How many pairs of a token and a choice the router sent to each expert, dropped ones included; float32."""
    dropped: jax.Array
    """How many of these pairs found no room at their expert; float32."""


def route(
    scores_BTE: jax.Array, spec: ModelSpec, bias_E: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose each token's experts.

    Arguments:
        scores_BTE: the router's scores, float32.
        spec: says how scores become weights, and how many experts a token gets, from how many groups.
        bias_E: added to what experts are chosen by, but not to their weights; None: nothing is.

    Returns:
        How much the router favours each expert, as shares that sum to 1, `[B, T, E]`; the experts chosen, best first,
        `[B, T, J]`; and their weights, `[B, T, J]`, float32.
    """
    sigmoid = spec.router == "sigmoid"
    favour_BTE = jax.nn.sigmoid(scores_BTE) if sigmoid else jax.nn.softmax(scores_BTE, axis=-1)
    wanted_BTE = jax.lax.stop_gradient(favour_BTE if bias_E is None else favour_BTE + bias_E)
    if spec.router_groups_used < spec.router_groups:
        wanted_BTE = _in_best_groups(wanted_BTE, spec)
    _, chosen_BTJ = top_k(wanted_BTE, min(spec.experts_per_token, spec.experts))
    gates_BTJ = _at(favour_BTE, chosen_BTJ)
    if spec.renormalize:
        gates_BTJ = gates_BTJ / (gates_BTJ.sum(axis=-1, keepdims=True) + 1e-20)
    if spec.router_scale != 1.0:
        gates_BTJ = gates_BTJ * spec.router_scale
    shares_BTE = favour_BTE / (favour_BTE.sum(axis=-1, keepdims=True) + 1e-20) if sigmoid else favour_BTE
    return shares_BTE, chosen_BTJ, gates_BTJ


def _in_best_groups(wanted_BTE: jax.Array, spec: ModelSpec) -> jax.Array:
    # Minus infinity outside of them (DeepSeek-V2, 2024, section 2.1.3: a token's experts lie on few devices).
    wanted_BTGE = wanted_BTE.reshape(*wanted_BTE.shape[:-1], spec.router_groups, -1)
    best = 1 if spec.router_group_score == "max" else 2
    scores_BTG = top_k(wanted_BTGE, best)[0].sum(axis=-1)
    _, used_BTU = top_k(scores_BTG, spec.router_groups_used)
    is_used_BTG = (used_BTU[..., None] == jnp.arange(spec.router_groups)).any(axis=-2)
    return jnp.where(is_used_BTG[..., None], wanted_BTGE, -jnp.inf).reshape(wanted_BTE.shape)


def top_k(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """As `jax.lax.top_k`, which on a mesh gathers all of `x` on each device: here each does its own part.

    Arguments:
        x: `[..., E]`.
        count: how many to find; at most E.

    Returns:
        The largest along the last axis, `[..., count]`, largest first, and their places; of equals the first is first.
    """
    index, left, chosen = jnp.arange(x.shape[-1]), jax.lax.stop_gradient(x), []
    for _ in range(count):
        chosen.append(jnp.argmax(left, axis=-1))
        left = jnp.where(index == chosen[-1][..., None], -jnp.inf, left)
    places = jnp.stack(chosen, axis=-1)
    return _at(x, places), places


def _at(x: jax.Array, places: jax.Array) -> jax.Array:
    return jnp.where(places[..., None] == jnp.arange(x.shape[-1]), x[..., None, :], 0.0).sum(axis=-1)


def what_it_did(
    scores_BTE: jax.Array,
    shares_BTE: jax.Array,
    chosen_BTJ: jax.Array,
    kept_BTJ: jax.Array | None,
    weights_BT: jax.Array,
    spec: ModelSpec,
) -> Routing:
    """Sum up a layer's routing.

    Arguments:
        scores_BTE: the router's scores.
        shares_BTE, chosen_BTJ: from `route`.
        kept_BTJ: which choices found room; None: all.
        weights_BT: how much each token counts.
        spec: the weights of the router's losses.
    """
    sent_BTE = (chosen_BTJ[..., None] == jnp.arange(spec.experts)).sum(axis=2) * weights_BT[..., None]
    load_BE, tokens_B = sent_BTE.sum(axis=1), weights_BT.sum(axis=1)
    dropped = jnp.zeros(()) if kept_BTJ is None else (weights_BT[..., None] * ~kept_BTJ).sum()
    # Sequence-wise balance (DeepSeek-V3, 2024), which no other sequence changes. It is 1 where all experts are equal.
    safe_B1 = jnp.where(tokens_B > 0, tokens_B, 1.0)[:, None]
    frequency_BE = load_BE * (spec.experts / chosen_BTJ.shape[2]) / safe_B1
    share_BE = (shares_BTE * weights_BT[..., None]).sum(axis=1) / safe_B1
    balance = (tokens_B * (frequency_BE * share_BE).sum(axis=-1)).sum()
    # ST-MoE (Zoph et al., 2022).
    size = (weights_BT * jnp.square(jax.nn.logsumexp(scores_BTE, axis=-1))).sum()
    return Routing(spec.balance_loss * balance + spec.router_z_loss * size, load_BE.sum(axis=0), dropped)


def keep_untrained(new: Any, old: Any) -> Any:
    """`new`, with what no optimizer may change as it is in `old`.

    Arguments:
        new, old: trees of the parameters' structure, nested dictionaries.
    """

    def choose(path: tuple, new: jax.Array, old: jax.Array) -> jax.Array:
        return old if getattr(path[-1], "key", None) == UNTRAINED else new

    return jax.tree_util.tree_map_with_path(choose, new, old)
