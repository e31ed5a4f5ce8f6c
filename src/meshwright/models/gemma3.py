"""Gemma 3 (2025): Gemma 2 with norms of queries and keys in place of bounds, and bases of rotary positions by layer."""

from typing import Any

from meshwright.models.gemma2 import gemma, read_gemma, weights, write_gemma
from meshwright.models.hf import Fields, refusal
from meshwright.models.hf_keys import read_layer_types, read_scaling, write_rope, write_scaling, write_sizes
from meshwright.models.spec import ModelSpec

__all__ = ["PRESETS", "hf_from_spec", "spec_from_hf", "weights"]

_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0  # of a config that doesn't say
_DEFAULTS = {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "intermediate_size": 9216,
}  # what published configs of models that read images leave out
_GEMMA3: dict[str, Any] = {
    "family": "gemma3",
    "qk_norm": "head",
    "rope_theta": _THETA,
    "local_rope_theta": _LOCAL_THETA,
    "global_every": 6,
}

PRESETS = {
    "gemma3-tiny": gemma(
        **_GEMMA3, layers=6, width=128, heads=4, kv_heads=1, ffn_width=352, context_length=256, window=32
    ),
    "gemma3-270m": gemma(
        **_GEMMA3,
        layers=18,
        width=640,
        heads=4,
        kv_heads=1,
        head_width=256,
        ffn_width=2048,
        context_length=32_768,
        window=512,
    ),
    "gemma3-1b": gemma(
        **_GEMMA3,
        layers=26,
        width=1152,
        heads=4,
        kv_heads=1,
        head_width=256,
        ffn_width=6912,
        context_length=32_768,
        window=512,
    ),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says, of a model that reads images too its text part.

    Raises:
        UserError: it can't be represented.
    """
    text = config.get("text_config", {}) if config.get("model_type") == "gemma3" else config
    fields = Fields(_DEFAULTS | text)
    spec = read_gemma(fields, attention_softcap=0.0, final_softcap=0.0) | {"family": "gemma3", "qk_norm": "head"}
    old, new = fields.take("sliding_window_pattern", 6), fields.take("_sliding_window_pattern", 6)
    every = old if "sliding_window_pattern" in fields else new
    window = fields.take("sliding_window", 4096)
    spec |= read_layer_types(fields, spec["layers"], window, lambda layer: (layer + 1) % every != 0)
    spec |= _read_ropes(fields, spec)
    fields.done()
    return ModelSpec(**spec)


def _read_ropes(fields: Fields, spec: dict[str, Any]) -> dict[str, Any]:
    by_kind = fields.take("rope_parameters", {})
    full = (by_kind.get("full_attention") or {}) | fields.take("rope_scaling", {})
    local = by_kind.get("sliding_attention") or {}
    full = {"rope_theta": fields.take("rope_theta", _THETA)} | full
    local = {"rope_theta": fields.take("rope_local_base_freq", _LOCAL_THETA)} | local
    if extra := by_kind.keys() - {"full_attention", "sliding_attention"}:
        raise refusal("rope_parameters", by_kind, f"can't hold {min(extra)} beside the kinds of layers")
    length = spec["context_length"]
    read = read_scaling("rope_parameters.full_attention", full, length)
    local_read = read_scaling("rope_parameters.sliding_attention", local, length)
    if not spec.get("window"):
        return read
    if len(local_read) > 1:
        raise refusal("rope_parameters.sliding_attention", local, "must be of the type 'default'")
    return read if local_read == read else read | {"local_rope_theta": local_read["rope_theta"]}


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    local = spec.local_rope_theta or (spec.rope_theta if spec.window else _LOCAL_THETA)
    return (
        write_sizes(spec, "gemma3_text", "Gemma3ForCausalLM")
        | write_gemma(spec)
        | write_rope(spec)
        | {
            "rope_local_base_freq": local,
            "rope_parameters": {
                "full_attention": write_scaling(spec),
                "sliding_attention": {"rope_type": "default", "rope_theta": local},
            },
        }
    )
