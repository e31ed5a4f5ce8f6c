"""Qwen3 (2025): Llama with norms of each head's queries and keys, and heads of a width of their own."""

from typing import Any

from meshwright.models.hf import Fields
from meshwright.models.hf_keys import write_sizes
from meshwright.models.llama import PRESETS as LLAMA
from meshwright.models.llama import weights
from meshwright.models.qwen2 import read_qwen, write_qwen
from meshwright.models.spec import ModelSpec

__all__ = ["PRESETS", "hf_from_spec", "spec_from_hf", "weights"]


def _qwen3(**changes: Any) -> ModelSpec:
    return ModelSpec(
        **LLAMA["llama-tiny"].model_dump()
        | {"family": "qwen3", "qk_norm": "head", "norm_eps": 1e-6, "rope_theta": 1_000_000.0}
        | changes
    )


PRESETS = {
    "qwen3-tiny": _qwen3(head_width=64),
    "qwen3-0.6b": _qwen3(
        layers=28, width=1024, heads=16, kv_heads=8, head_width=128, ffn_width=3072, context_length=40_960
    ),
    "qwen3-1.7b": _qwen3(
        layers=28, width=2048, heads=16, kv_heads=8, head_width=128, ffn_width=6144, context_length=40_960
    ),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields({"head_dim": 128, **config})
    fields.expect("attention_bias", False)
    spec = read_qwen(fields) | {"family": "qwen3", "qk_norm": "head"}
    fields.done()
    return ModelSpec(**spec)


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return write_sizes(spec, "qwen3", "Qwen3ForCausalLM") | write_qwen(spec) | {"attention_bias": False}
