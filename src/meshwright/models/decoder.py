"""One decoder for every family: embedding, a stack of blocks, head.

Shapes: B batch, T time, S cached time, D width, V vocabulary, L layers, K key-value heads, C head width.

The blocks' parameters are stacked: each has a leading axis of L layers. So the layers can run as a scan, be unrolled
by static index, or be cut into pipeline stages, and the parameters are the same in each case.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from meshwright.models.attention import Attention, LayerCache, Rotary, rotary_angles
from meshwright.models.layers import LayerNorm, Linear, RMSNorm, dropout
from meshwright.models.mlp import MLP
from meshwright.models.spec import ModelSpec

INIT_STD = 0.02


def make_norm(spec: ModelSpec) -> LayerNorm | RMSNorm:
    """The norm that the spec asks for."""
    return (LayerNorm if spec.norm == "layernorm" else RMSNorm)(spec.width, eps=spec.norm_eps)


class Block(nnx.Module):
    """Attention and MLP, each with a norm and a residual.

    `pre`: `x + f(norm(x))` (GPT-2, Llama); `post`: `norm(x + f(x))` (Vaswani et al., 2017; miniGPT).
    """

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        out_std = INIT_STD / math.sqrt(2 * spec.layers)  # keeps the residual stream's variance at 1 + O(1) (GPT-2)
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec, std=INIT_STD, out_std=out_std, rngs=rngs)
        self.mlp_norm = make_norm(spec)
        self.mlp = MLP(spec, std=INIT_STD, out_std=out_std, rngs=rngs)
        self.spec = spec

    def __call__(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        rotary: Rotary | None,
        dropout_keys_B: jax.Array | None = None,
        cache: LayerCache | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """Arguments and returns as in `Attention`."""
        pre, rate = self.spec.norm_placement == "pre", self.spec.dropout
        y_BTD = self.attention_norm(x_BTD) if pre else x_BTD
        y_BTD, cache = self.attention(y_BTD, positions_BT, rotary, dropout_keys_B, cache)
        x_BTD = x_BTD + dropout(y_BTD, rate, dropout_keys_B, site=1)
        x_BTD = x_BTD if pre else self.attention_norm(x_BTD)
        y_BTD = self.mlp(self.mlp_norm(x_BTD) if pre else x_BTD)
        x_BTD = x_BTD + dropout(y_BTD, rate, dropout_keys_B, site=2)
        return x_BTD if pre else self.mlp_norm(x_BTD), cache


class Decoder(nnx.Module):
    """A decoder-only transformer. A subclass with another `block` is a decoder made of those.

    Arguments:
        spec: the architecture; `vocab_size` must be set.
        rngs: the stream `params` gives the initial parameters.
    """

    block = Block

    def __init__(self, spec: ModelSpec, *, rngs: nnx.Rngs):
        if spec.vocab_size == 0:
            raise ValueError("vocab_size = 0: the spec must name the vocabulary's size before a model is built")
        self.spec = spec
        self.embedding = nnx.Param(INIT_STD * jax.random.normal(rngs.params(), (spec.vocab_size, spec.width)))
        if spec.positions == "learned":
            table = INIT_STD * jax.random.normal(rngs.params(), (spec.context_length, spec.width))
            self.position_embedding = nnx.Param(table)
        self.blocks = _stack_of_blocks(self.block, spec, rngs)
        self.final_norm = make_norm(spec) if spec.norm_placement == "pre" else None
        self.head = None if spec.tied_embeddings else _make_head(spec, rngs)

    def hidden(
        self,
        tokens_BT: jax.Array,
        *,
        dtype: jnp.dtype = jnp.float32,
        dropout_keys_B: jax.Array | None = None,
        scan_layers: bool = False,
    ) -> jax.Array:
        """The residual stream after the last layer and norm, from which `logits` reads.

        Arguments:
            tokens_BT: token ids; T at most the context length.
            dtype: the type to compute in.
            dropout_keys_B: a random key for each example; None: no dropout.
            scan_layers: loop over the layers rather than unroll them.

        Returns:
            `[B, T, D]`, of type `dtype`.
        """
        positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        x_BTD, rotary = self._embed(tokens_BT, positions_BT, dtype)
        keys_LB = None
        if dropout_keys_B is not None and self.spec.dropout > 0.0:
            x_BTD = dropout(x_BTD, self.spec.dropout, dropout_keys_B, site=0)
            fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
            keys_LB = jax.vmap(fold, in_axes=(None, 0))(dropout_keys_B, 1 + jnp.arange(self.spec.layers))
        x_BTD, _ = self._layers(x_BTD, positions_BT, rotary, keys_LB, None, scan_layers)
        return x_BTD if self.final_norm is None else self.final_norm(x_BTD)

    def head_weights(self) -> tuple[jax.Array, jax.Array | None]:
        """The kernel, `[D, V]`, and the bias, `[V]` or None, of the linear map from `hidden` to scores."""
        if self.head is None:
            return self.embedding[...].T, None
        return self.head.kernel[...], None if self.head.bias is None else self.head.bias[...]

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Scores of the next token, `[B, T, V]`, of the type of `x_BTD`."""
        kernel_DV, bias_V = self.head_weights()
        scores_BTV = x_BTD @ kernel_DV.astype(x_BTD.dtype)
        return scores_BTV if bias_V is None else scores_BTV + bias_V.astype(x_BTD.dtype)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        """Scores of the token after each, `[B, T, V]` float32, without dropout."""
        return self.logits(self.hidden(tokens_BT))

    def empty_cache(self, batch: int, length: int, dtype: jnp.dtype = jnp.float32) -> LayerCache:
        """A cache for `decode`: `[L, B, S, K, C]` keys and values, S = `length` positions, at most the context's."""
        shape = (self.spec.layers, batch, length, self.spec.kv_heads, self.spec.head_width)
        return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def decode(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, cache: LayerCache, *, dtype: jnp.dtype = jnp.float32
    ) -> tuple[jax.Array, LayerCache]:
        """The same as `hidden`, given the cache of what came before.

        Arguments:
            tokens_BT: the next tokens of each row.
            positions_BT: where they stand, counted from 0; rows may differ.
            cache: from `empty_cache` or an earlier call.

        Returns:
            `[B, T, D]`, and the cache with these tokens written at their positions.
        """
        x_BTD, rotary = self._embed(tokens_BT, positions_BT, dtype)
        x_BTD, cache = self._layers(x_BTD, positions_BT, rotary, None, cache, scan_layers=False)
        return (x_BTD if self.final_norm is None else self.final_norm(x_BTD)), cache

    def _embed(
        self, tokens_BT: jax.Array, positions_BT: jax.Array, dtype: jnp.dtype
    ) -> tuple[jax.Array, Rotary | None]:
        x_BTD = self.embedding[...][tokens_BT]
        if self.spec.positions == "learned":
            return (x_BTD + self.position_embedding[...][positions_BT]).astype(dtype), None
        return x_BTD.astype(dtype), rotary_angles(positions_BT, self.spec.head_width, self.spec.rope_theta)

    def _layers(
        self,
        x_BTD: jax.Array,
        positions_BT: jax.Array,
        rotary: Rotary | None,
        keys_LB: jax.Array | None,
        cache: LayerCache | None,
        scan_layers: bool,
    ) -> tuple[jax.Array, Any]:
        graph, stacked = nnx.split(self.blocks)

        def apply(x_BTD: jax.Array, layer: tuple) -> tuple[jax.Array, LayerCache | None]:
            params, keys_B, layer_cache = layer
            return nnx.merge(graph, params)(x_BTD, positions_BT, rotary, keys_B, layer_cache)

        layers = (stacked, keys_LB, cache)
        if scan_layers:
            return jax.lax.scan(apply, x_BTD, layers)
        caches = []
        for layer in _unstack(layers, self.spec.layers):
            x_BTD, layer_cache = apply(x_BTD, layer)
            caches.append(layer_cache)
        return x_BTD, (None if cache is None else jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches))


def _make_head(spec: ModelSpec, rngs: nnx.Rngs) -> Linear:
    return Linear(spec.width, spec.vocab_size, bias=spec.head_bias, std=INIT_STD, rngs=rngs)


def _stack_of_blocks(block: type[Block], spec: ModelSpec, rngs: nnx.Rngs) -> Block:
    @nnx.split_rngs(splits=spec.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return block(spec, rngs=rngs)

    return make(rngs)


def _unstack(tree: tuple, count: int) -> list[tuple]:
    # jnp.unstack's gradient is one concatenation; that of x[i] adds `count` arrays of the full size.
    leaves, structure = jax.tree.flatten(tree)
    columns = [jnp.unstack(leaf) for leaf in leaves]
    return [jax.tree.unflatten(structure, [column[i] for column in columns]) for i in range(count)]


def parameter_count(spec: ModelSpec) -> int:
    """How many parameters the model of a spec has, found without allocating it."""
    model = nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0)))
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
