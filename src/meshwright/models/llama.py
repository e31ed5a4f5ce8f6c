"""Llama (Touvron et al., 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Llama 2 and 3 and SmolLM2 are checkpoints of this family.
"""

from typing import Any

from meshwright.models.hf import Fields, refusal
from meshwright.models.hf_keys import read_rope, read_sizes, write_rope, write_sizes
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, linear


def _llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn_width: int,
    context_length: int = 2048,
    rope_theta: float = 10_000.0,
    tied: bool = True,
    **more: Any,
) -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=ffn_width,
        context_length=context_length,
        rope_theta=rope_theta,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied_embeddings=tied,
        **more,
    )


PRESETS = {
    "llama-tiny": _llama(layers=4, width=128, heads=4, kv_heads=2, ffn_width=352, context_length=256),
    "llama-mini": _llama(layers=6, width=256, heads=4, kv_heads=2, ffn_width=704, context_length=512),
    "llama-135m": _llama(layers=30, width=576, heads=9, kv_heads=3, ffn_width=1536),
    "llama-360m": _llama(layers=32, width=960, heads=15, kv_heads=5, ffn_width=2560),
    "llama-1b": _llama(
        layers=16, width=2048, heads=32, kv_heads=8, ffn_width=8192, context_length=8192, rope_theta=500_000.0
    ),
    "smollm2-135m": _llama(
        layers=30, width=576, heads=9, kv_heads=3, ffn_width=1536, context_length=8192, rope_theta=100_000.0
    ),
    "llama3.2-1b": _llama(
        layers=16,
        width=2048,
        heads=32,
        kv_heads=8,
        ffn_width=8192,
        context_length=131_072,
        rope_theta=500_000.0,
        rope_scaling="llama3",
        rope_factor=32.0,
        rope_original_length=8192,
    ),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields(config, ("is_llama_config",))
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("rope_interleaved", False)
    spec = read_sizes(fields, eps=1e-6, tied=False) | read_rope(fields)
    attention, mlp = fields.take("attention_bias", False), fields.take("mlp_bias", False)
    if attention != mlp:
        raise refusal("attention_bias", attention, f"must be as mlp_bias = {mlp}")
    fields.done()
    return ModelSpec(**spec | {"family": "llama", "bias": attention})


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return write_sizes(spec, "llama", "LlamaForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": spec.bias,
        "mlp_bias": spec.bias,
        **write_rope(spec),
    }


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every parameter."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return [*outer_rules(spec), *attention_rules(spec), *mlp_rules(spec), *norm_rules(norms)]


# What families like Llama share.


def outer_rules(spec: ModelSpec) -> list[Rule]:
    """The rules of what isn't in a layer."""
    rules = [Rule("embedding", "model.embed_tokens.weight"), Rule("final_norm.scale", "model.norm.weight")]
    return rules if spec.tied_embeddings else [*rules, *linear("head", "lm_head")]


def attention_rules(spec: ModelSpec) -> list[Rule]:
    """The rules of attention, with norms of queries and keys where the spec has them."""
    ours, theirs = "blocks.attention", "model.layers.{layer}.self_attn"
    rules = []
    for part, name in {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}.items():
        bias = spec.bias or (spec.qkv_bias and part != "out")
        rules += linear(f"{ours}.{part}", f"{theirs}.{name}", bias=bias)
    if spec.qk_norm != "none":
        rules += [Rule(f"{ours}.{part}_norm.scale", f"{theirs}.{part[0]}_norm.weight") for part in ("query", "key")]
    return rules


def mlp_rules(spec: ModelSpec) -> list[Rule]:
    """The rules of a feed-forward part with a gate."""
    parts, theirs = ("gate", "up", "down"), "model.layers.{layer}.mlp"
    return [rule for part in parts for rule in linear(f"blocks.mlp.{part}", f"{theirs}.{part}_proj", bias=spec.bias)]


def norm_rules(names: dict[str, str]) -> list[Rule]:
    """The rules of a layer's norms.

    Arguments:
        names: theirs by ours.
    """
    theirs = "model.layers.{layer}"
    return [Rule(f"blocks.{ours}.scale", f"{theirs}.{name}.weight") for ours, name in names.items()]
