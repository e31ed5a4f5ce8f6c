"""Qwen2 and Qwen2.5 (2024): Llama with biases of queries, keys and values."""

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
from meshwright.models.llama import PRESETS as LLAMA
from meshwright.models.llama import weights
from meshwright.models.spec import ModelSpec

__all__ = ["PRESETS", "hf_from_spec", "spec_from_hf", "weights"]


def _qwen2(**changes: Any) -> ModelSpec:
    return ModelSpec(
        **LLAMA["llama-tiny"].model_dump()
        | {"family": "qwen2", "qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1_000_000.0}
        | changes
    )


PRESETS = {
    "qwen2-tiny": _qwen2(),
    "qwen2.5-0.5b": _qwen2(
        layers=24, width=896, heads=14, kv_heads=2, head_width=64, ffn_width=4864, context_length=32_768
    ),
    "qwen2.5-1.5b": _qwen2(
        layers=28, width=1536, heads=12, kv_heads=2, head_width=128, ffn_width=8960, context_length=131_072
    ),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields(config)
    fields.expect("use_mrope", False)
    spec = read_qwen(fields) | {"family": "qwen2", "qkv_bias": True}
    fields.done()
    return ModelSpec(**spec)


def read_qwen(fields: Fields) -> dict[str, Any]:
    """Keys of `ModelSpec` that all of Qwen's families have."""
    fields.expect("hidden_act", "silu", "swish")
    spec = read_sizes(fields, eps=1e-6, tied=False, all_heads=False) | read_rope(fields)
    window = fields.take("sliding_window", 0) if fields.take("use_sliding_window", False) else 0
    fields.take("sliding_window", 0)
    first = fields.take("max_window_layers", 28)
    return spec | read_layer_types(fields, spec["layers"], window, lambda layer: layer >= first)


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return write_sizes(spec, "qwen2", "Qwen2ForCausalLM") | write_qwen(spec)


def write_qwen(spec: ModelSpec) -> dict[str, Any]:
    """Undoes `read_qwen`, sizes excepted."""
    return {
        "hidden_act": "silu",
        **write_rope(spec),
        "use_sliding_window": bool(spec.window),
        "sliding_window": spec.window or None,
        "max_window_layers": 0 if spec.window else spec.layers,
        "layer_types": write_layer_types(spec),
    }
