"""Gemma 2 (2024): norms before and after each part, GeGLU, bounded scores, a window in every other layer."""

import math
from typing import Any

from meshwright.models.hf import Fields
from meshwright.models.hf_keys import (
    read_layer_types,
    read_rope,
    read_sizes,
    write_layer_types,
    write_rope,
    write_sizes,
)
from meshwright.models.llama import attention_rules, mlp_rules, norm_rules, outer_rules
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, one_less, one_more


def gemma(width: int, **more: Any) -> ModelSpec:
    """An architecture of Gemma.

    Arguments:
        width: of the residual stream, which the scale of the embeddings goes by.
        more: keys of `ModelSpec`.
    """
    return ModelSpec(**_common(width) | {"width": width} | more)


def _common(width: int) -> dict[str, Any]:
    return {
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_placement": "both",
        "norm_eps": 1e-6,
        "activation": "geglu",
        "bias": False,
        "embedding_scale": math.sqrt(width),
    }


_GEMMA2: dict[str, Any] = {"family": "gemma2", "attention_softcap": 50.0, "final_softcap": 30.0, "global_every": 2}

PRESETS = {
    "gemma2-tiny": gemma(
        **_GEMMA2, layers=4, width=128, heads=4, kv_heads=2, ffn_width=352, context_length=256, window=64
    ),
    "gemma2-2b": gemma(
        **_GEMMA2,
        layers=26,
        width=2304,
        heads=8,
        kv_heads=4,
        head_width=256,
        ffn_width=9216,
        context_length=8192,
        window=4096,
    ),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields(config)
    spec = read_gemma(fields, attention_softcap=50.0, final_softcap=30.0) | read_rope(fields)
    window = fields.take("sliding_window", 4096)
    windows = read_layer_types(fields, spec["layers"], window, lambda layer: layer % 2 == 0)
    fields.done()
    return ModelSpec(**spec | windows | {"family": "gemma2"})


def read_gemma(fields: Fields, **softcaps: float) -> dict[str, Any]:
    """Keys of `ModelSpec` that all of Gemma's families have.

    Arguments:
        fields: of the config.
        softcaps: the bounds of a config that doesn't say.
    """
    fields.expect("hidden_activation", "gelu_pytorch_tanh", "gelu_new")
    fields.take("hidden_act", "")  # of no use to transformers either
    fields.expect("attention_bias", False)
    fields.expect("use_bidirectional_attention", False)
    spec = read_sizes(fields, eps=1e-6, tied=True, all_heads=False)
    for ours, theirs in _SOFTCAPS.items():
        spec[ours] = 0.0 if fields.is_null(theirs) else fields.take(theirs, softcaps[ours])
    per_head = fields.take("query_pre_attn_scalar", 256.0)
    spec["attention_scale"] = 0.0 if per_head == spec["head_width"] else per_head**-0.5
    return spec | _common(spec["width"]) | {"norm_eps": spec["norm_eps"]}


_SOFTCAPS = {"attention_softcap": "attn_logit_softcapping", "final_softcap": "final_logit_softcapping"}


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    config = write_sizes(spec, "gemma2", "Gemma2ForCausalLM") | write_gemma(spec)
    return config | write_rope(spec)


def write_gemma(spec: ModelSpec) -> dict[str, Any]:
    """Undoes `read_gemma`, sizes excepted, and writes the windows."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": round(spec.attention_scale**-2) if spec.attention_scale else spec.head_width,
        "sliding_window": spec.window or 4096,
        "layer_types": write_layer_types(spec),
    } | {theirs: getattr(spec, ours) or None for ours, theirs in _SOFTCAPS.items()}


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every parameter."""
    norms = {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    }
    rules = [*outer_rules(spec), *attention_rules(spec), *mlp_rules(spec), *norm_rules(norms)]
    return [_from_one(rule) if rule.ours.endswith("norm.scale") else rule for rule in rules]


def _from_one(rule: Rule) -> Rule:
    return rule._replace(to_ours=one_more, to_theirs=one_less)
