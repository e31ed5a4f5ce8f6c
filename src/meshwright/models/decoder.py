"""One decoder for every family: embedding, a stack of blocks, head.

Shapes: B batch, T time, S cached time, D width, V vocabulary, L layers, E experts.

The blocks' parameters are stacked: each has a leading axis of L layers. So the layers can run as a scan, be unrolled
by static index, or be cut into pipeline stages, and the parameters are the same in each case.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models import one_token, rope
from meshwright.models.attention import Attention, FromStart, Places
from meshwright.models.gradients import capped, look_up
from meshwright.models.latent import LatentAttention
from meshwright.models.layers import LayerNorm, Linear, RMSNorm, dropout
from meshwright.models.layout import layout
from meshwright.models.mlp import MLP
from meshwright.models.moe import MoE, Routing
from meshwright.models.precision import is_multiplied
from meshwright.models.spec import ModelSpec
from meshwright.models.stacks import dense_spec, stack_of, unstack

INIT_STD = 0.02

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "products": jax.checkpoint_policies.save_only_these_names("product"),
}
"""What a layer keeps from its forward pass for the backward one; the rest is computed again."""


def make_norm(spec: ModelSpec) -> LayerNorm | RMSNorm:
    """The norm that the spec asks for."""
    return (LayerNorm if spec.norm == "layernorm" else RMSNorm)(spec.width, eps=spec.norm_eps)


class Block(nnx.Module):
    """Attention and a feed-forward part (one, or a mixture of experts), each with a norm and a residual.

    `pre`: `x + f(norm(x))` (GPT-2, Llama); `post`: `norm(x + f(x))` (Vaswani et al., 2017; miniGPT); `both`:
    `x + norm(f(norm(x)))` (Gemma 2); `after`: `x + norm(f(x))` (OLMo 2).
    """

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        out_std = INIT_STD / math.sqrt(2 * spec.layers)  # keeps the residual stream's variance at 1 + O(1) (GPT-2)
        self.attention_norm = make_norm(spec)
        self.attention = attention_of(spec)(spec, std=INIT_STD, out_std=out_std, rngs=rngs)
        self.mlp_norm = make_norm(spec)
        self.mlp: MoE | MLP = (
            MoE(spec, std=INIT_STD, out_std=out_std, rngs=rngs)
            if spec.experts
            else MLP(spec, spec.ffn_width, std=INIT_STD, out_std=out_std, rngs=rngs)
        )
        if spec.norm_placement == "both":
            self.attention_out_norm = make_norm(spec)
            self.mlp_out_norm = make_norm(spec)
        self.spec = spec

    def __call__(
        self, x_BTD: jax.Array, places: Places, dropout_keys_B: jax.Array | None = None, cache: Any = None
    ) -> tuple[jax.Array, Any, Routing | None]:
        """Arguments as in `Attention`.

        Returns:
            The residual stream, the new cache, and what the router did where there are experts.
        """
        placement, rate = self.spec.norm_placement, self.spec.dropout
        before = placement in ("pre", "both")
        y_BTD, x_BTD = self.attention_norm.beside(x_BTD) if before else (x_BTD, x_BTD)
        generates = cache is not None
        y_BTD, cache = self.attention(y_BTD, places, dropout_keys_B, cache)
        if placement in ("both", "after"):
            y_BTD = (self.attention_out_norm if before else self.attention_norm)(y_BTD)
        x_BTD = x_BTD + dropout(y_BTD, rate, dropout_keys_B, 1, places.order_T)
        x_BTD = self.attention_norm(x_BTD) if placement == "post" else x_BTD
        y_BTD, x_BTD = self.mlp_norm.beside(x_BTD) if before else (x_BTD, x_BTD)
        y_BTD, routing = self._feed_forward(y_BTD, places, generates)
        if placement in ("both", "after"):
            y_BTD = (self.mlp_out_norm if before else self.mlp_norm)(y_BTD)
        x_BTD = x_BTD + dropout(y_BTD, rate, dropout_keys_B, 2, places.order_T)
        return self.mlp_norm(x_BTD) if placement == "post" else x_BTD, cache, routing

    def _feed_forward(self, x_BTD: jax.Array, places: Places, generates: bool) -> tuple[jax.Array, Routing | None]:
        if isinstance(self.mlp, MoE):
            return self.mlp(x_BTD, places, keep_all=generates)
        return self.mlp(x_BTD), None


def attention_of(spec: ModelSpec) -> type[Attention] | type[LatentAttention]:
    """The kind of attention that the spec asks for."""
    return LatentAttention if spec.attention == "latent" else Attention


class Told(NamedTuple):
    """What each layer is told of its own; a leading axis of layers goes before what is here of one."""

    dropout_keys_B: jax.Array | None
    """A random key for each example; None: no dropout."""
    window: jax.Array | None
    """How many tokens a token sees, itself included, `[]`; 0: all before it. None: no layer has a window."""


class Start(NamedTuple):
    """What goes into the first layer, what all layers are told, and what each of them is."""

    x_BTD: jax.Array
    places: Places
    told_L: Told


class Decoder(nnx.Module):
    """A decoder-only transformer. A subclass with another `block` is a decoder made of those.

    Arguments:
        spec: the architecture; `vocab_size` must be set.
        rngs: the stream `params` gives the initial parameters.
        order_L: which layer each place of the stacked blocks holds; None: in order.
    """

    block = Block

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs, order_L: tuple[int, ...] | None = None):
        if spec.vocab_size == 0:
            raise ValueError("vocab_size = 0: the spec must name the vocabulary's size before a model is built")
        self.spec = spec
        table_VD = INIT_STD * jax.random.normal(rngs.params(), (spec.vocab_size, spec.width))
        self.embedding = nnx.Param(table_VD, axes=("vocab", "width"))
        if spec.positions == "learned":
            table_SD = INIT_STD * jax.random.normal(rngs.params(), (spec.context_length, spec.width))
            self.position_embedding = nnx.Param(table_SD, axes=("positions", "width"))
        if spec.dense_layers:
            self.dense_blocks = stack_of(self.block, dense_spec(spec), rngs, spec.dense_layers, None)
        self.blocks = stack_of(self.block, spec, rngs, spec.layers - spec.dense_layers, order_L)
        self.final_norm = make_norm(spec) if spec.norm_placement != "post" else None
        self.head = None if spec.tied_embeddings else _make_head(spec, rngs)

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        positions_BT: jax.Array | None = None,
        segments_BT: jax.Array | None = None,
        weights_BT: jax.Array | None = None,
        dtype: jnp.dtype = jnp.float32,
        dropout_keys_B: jax.Array | None = None,
        scan_layers: bool = False,
        remat: str = "none",
    ) -> tuple[jax.Array, Routing | None]:
        """The residual stream after the last layer and norm, from which `logits` reads.

        Arguments:
            tokens_BT: token ids; T at most the context length.
            positions_BT, segments_BT, weights_BT: see `Places`; positions None: the place in the row.
            dtype: the type to compute in.
            dropout_keys_B: a random key for each example; None: no dropout.
            scan_layers: loop over the layers rather than unroll them.
            remat: a key of `REMAT`.

        Returns:
            `[B, T, D]`, of type `dtype`; and what the routers did, over all layers, where there are experts.
        """
        rows_BTD = self.embedded(tokens_BT, dtype)
        start = self.start(rows_BTD, positions_BT, segments_BT, weights_BT, dtype, dropout_keys_B)
        x_BTD, routing_L = start.x_BTD, None
        for blocks, told_L in self._stacks(start.told_L):
            x_BTD, routing_L = self._through(blocks, x_BTD, start.places, told_L, scan_layers, remat)
        return self.finish(x_BTD), routing_L

    def _stacks(self, of_layers: Any) -> list[tuple[Block, Any]]:
        """Each stack of blocks, and its part of arrays with a leading axis of all layers."""
        dense = self.spec.dense_layers
        if not dense:
            return [(self.blocks, of_layers)]
        first, rest = (jax.tree.map(lambda x, cut=cut: x[cut], of_layers) for cut in (slice(dense), slice(dense, None)))
        return [(self.dense_blocks, first), (self.blocks, rest)]

    def _through(
        self, blocks: Block, x_BTD: jax.Array, places: Places, told_L: Told, scan_layers: bool, remat: str
    ) -> tuple[jax.Array, Routing | None]:
        """The residual stream after a stack of blocks, and what its routers did."""
        layers = nnx.split(blocks)[1], told_L
        if scan_layers:
            apply = self.layer_function(remat, blocks)

            def one(x_BTD: jax.Array, layer: tuple) -> tuple[jax.Array, Routing | None]:
                params, told = layer
                return apply(params, x_BTD, places, told)

            return jax.lax.scan(one, x_BTD, layers)
        each = []
        windows = self.spec.layer_windows if self.spec.window else [None] * self.spec.layers
        mine = windows[: self.spec.dense_layers] if blocks is not self.blocks else windows[self.spec.dense_layers :]
        of_window = {window: self.layer_function(remat, blocks, window) for window in set(mine)}
        for window, (params, told) in zip(mine, unstack(layers), strict=True):
            x_BTD, routing = of_window[window](params, x_BTD, places, told._replace(window=None))
            each.append(routing)
        return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def embedded(self, tokens: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """The embeddings of tokens `[..., B, T]`, with an axis of width added; `dtype` is what comes after."""
        scale, whole = self.spec.embedding_scale, self.embedding.dtype
        rounded = dtype if is_multiplied("embedding", 2, self.spec) else whole
        x = look_up(self.embedding[...], tokens, rounded, dtype if scale == 1.0 else whole)
        return x if scale == 1.0 else scale * x

    def start(
        self,
        rows_BTD: jax.Array,
        positions_BT: jax.Array | None,
        segments_BT: jax.Array | None,
        weights_BT: jax.Array | None,
        dtype: jnp.dtype,
        dropout_keys_B: jax.Array | None,
    ) -> Start:
        """What comes before the layers; `rows_BTD` is from `embedded`, the other arguments are as in `hidden`."""
        order_T = layout().order_T(rows_BTD.shape[1])
        places = self._places(order_T[None] if positions_BT is None else positions_BT, order_T)
        places = places._replace(segments_BT=segments_BT, weights_BT=weights_BT)
        x_BTD, keys_LB = self._placed(rows_BTD, places.positions_BT, dtype), None
        if dropout_keys_B is not None and self.spec.dropout > 0.0:
            x_BTD = dropout(x_BTD, self.spec.dropout, dropout_keys_B, 0, order_T)
            fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
            keys_LB = jax.vmap(fold, in_axes=(None, 0))(dropout_keys_B, 1 + jnp.arange(self.spec.layers))
        return Start(x_BTD, places, Told(keys_LB, self._windows_L()))

    def layer_function(
        self, remat: str, blocks: Block | None = None, window: int | None = None
    ) -> Callable[..., tuple[jax.Array, Routing | None]]:
        """One layer as a function of `(params, x_BTD, places, told)`, to what it makes of the residual stream
        and what its router did. `params` are a slice of the stacked ones, those of `blocks` (None: `self.blocks`).
        `window` is the layer's own, where it is known when the layer is traced; then `told` has none."""
        graph = nnx.split(self.blocks if blocks is None else blocks)[0]

        def apply(params: Any, x_BTD: jax.Array, places: Places, told: Told) -> tuple[jax.Array, Routing | None]:
            if (of_layer := told.window if window is None else window) is not None:
                places = places.of_layer(of_layer, reached=places.order_T.size > self.spec.window)
            block = nnx.merge(graph, layout().gather(params, x_BTD.dtype))
            x_BTD, _, routing = block(x_BTD, places, told.dropout_keys_B)
            return layout().place(x_BTD, "batch", "sequence", None), routing

        return apply if remat == "none" else jax.checkpoint(apply, policy=REMAT[remat])

    def finish(self, x_BTD: jax.Array) -> jax.Array:
        """What comes after the layers, the head excepted."""
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)

    def head_weights(self) -> tuple[jax.Array, jax.Array | None]:
        """The kernel, `[D, V]`, and the bias, `[V]` or None, of the linear map from `hidden` to scores."""
        if self.head is None:
            return self.embedding[...].T, None
        return self.head.kernel[...], None if self.head.bias is None else self.head.bias[...]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Scores of the next token, `[B, T, V]` float32: rounded to 16 bits, the likeliest ones are often equal."""
        kernel_DV, bias_V = self.head_weights()
        scores_BTV = jnp.matmul(x_BTD, kernel_DV.astype(x_BTD.dtype), preferred_element_type=jnp.float32)
        scores_BTV = scores_BTV if bias_V is None else scores_BTV + bias_V
        scores_BTV = scores_BTV[..., : self.spec.vocab_size]  # a layout may have padded the vocabulary
        return capped(scores_BTV, self.spec.final_softcap)[0]

    def __call__(self, tokens_BT: jax.Array, **more: Any) -> jax.Array:
        """Scores of the token after each, `[B, T, V]` float32, without dropout; more arguments as in `hidden`."""
        return self.logits(self.hidden(tokens_BT, **more)[0])

    def empty_cache(self, batch: int, length: int, dtype: jnp.dtype = jnp.float32) -> Any:
        """A cache for `decode`, of `length` positions, at most the context's; leaves are `[L, B, ...]`."""
        one = attention_of(self.spec).empty_cache(self.spec, batch, length, dtype)
        return jax.tree.map(lambda leaf: jnp.zeros((self.spec.layers, *leaf.shape), leaf.dtype), one)

    def decode(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array,
        cache: Any,
        *,
        dtype: jnp.dtype = jnp.float32,
        from_start: bool = False,
    ) -> tuple[jax.Array, Any]:
        """The same as `hidden`, given the cache of what came before.

        Arguments:
            tokens_BT: the next tokens of each row.
            positions_BT: where they stand, counted from 0; rows may differ.
            cache: from `empty_cache` or an earlier call.
            from_start: whether they are the first ones, in order: then they are attended to as in training, which may
                be by a kernel that never writes out their scores.

        Returns:
            `[B, T, D]`, and the cache with these tokens written at their positions.
        """
        places = self._places(positions_BT, jnp.arange(tokens_BT.shape[1]))
        x_BTD = self._placed(self.embedded(tokens_BT, dtype), positions_BT, dtype)
        layers: list[one_token.Layer] = []
        for blocks, of_layers in self._stacks(cache):
            graph, stacked = nnx.split(blocks)
            for params, layer_cache in unstack((stacked, of_layers)):
                block, of_layer = nnx.merge(graph, layout().gather(params, x_BTD.dtype)), places
                if self.spec.window:
                    of_layer = places.of_layer(self.spec.layer_windows[len(layers)], reached=True)
                layers.append(one_token.Layer(block, of_layer, layer_cache))
        if one_token.applies(layers, x_BTD):
            x_BTD, caches = one_token.through(layers, x_BTD)
        else:
            caches = []
            for block, of_layer, layer_cache in layers:
                given = FromStart(layer_cache) if from_start else layer_cache
                x_BTD, layer_cache, _ = block(x_BTD, of_layer, None, given)
                caches.append(layer_cache)
        return self.finish(x_BTD), jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)

    def _places(self, positions_BT: jax.Array, order_T: jax.Array) -> Places:
        if self.spec.positions == "learned":
            return Places(positions_BT, order_T)
        local = rope.angles(self.spec, positions_BT, local=True) if self.spec.local_rope_theta else None
        return Places(positions_BT, order_T, rope.angles(self.spec, positions_BT), local_rotary=local)

    def _windows_L(self) -> jax.Array | None:
        return jnp.array(self.spec.layer_windows, jnp.int32) if self.spec.window else None

    def _placed(self, x_BTD: jax.Array, positions_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
        if self.spec.positions == "learned":
            x_BTD = x_BTD + self.position_embedding[...][positions_BT]
        return layout().place(x_BTD.astype(dtype), "batch", "sequence", None)


def _make_head(spec: ModelSpec, rngs: nnx.Rngs) -> Linear:
    return Linear(spec.width, spec.vocab_size, ("width", "vocab"), bias=spec.head_bias, std=INIT_STD, rngs=rngs)


def parameter_count(spec: ModelSpec) -> int:
    """How many parameters the model of a spec has, found without allocating it."""
    model = nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def active_parameter_count(spec: ModelSpec) -> int:
    """How many parameters take part in the computation of one token: all but those of the experts not chosen."""
    if not spec.experts:
        return parameter_count(spec)
    fewer = min(spec.experts, spec.experts_per_token)
    each = spec.width + spec.router_bias
    router = (spec.layers - spec.dense_layers) * each * (spec.experts - fewer)  # every token passes the whole router
    return parameter_count(spec.model_copy(update={"experts": fewer})) + router
