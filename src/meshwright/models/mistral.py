"""Mistral (Jiang et al., 2023): Llama with a window."""

from typing import Any

from meshwright.models.hf import Fields
from meshwright.models.hf_keys import read_rope, read_sizes, write_rope, write_sizes
from meshwright.models.llama import PRESETS as LLAMA
from meshwright.models.llama import weights
from meshwright.models.spec import ModelSpec

__all__ = ["PRESETS", "hf_from_spec", "spec_from_hf", "weights"]

_WINDOW = 4096  # of a config that doesn't say


def _mistral(**changes: Any) -> ModelSpec:
    tiny = LLAMA["llama-tiny"].model_dump()
    return ModelSpec(**tiny | {"family": "mistral", "tied_embeddings": False} | changes)


PRESETS = {
    "mistral-tiny": _mistral(window=64),
    "mistral-7b": _mistral(
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_width=128,
        ffn_width=14_336,
        context_length=32_768,
        window=_WINDOW,
    ),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields(config)
    fields.expect("hidden_act", "silu", "swish")
    spec = read_sizes(fields, eps=1e-6, tied=False) | read_rope(fields)
    window = 0 if fields.is_null("sliding_window") else fields.take("sliding_window", _WINDOW)
    fields.done()
    return ModelSpec(**spec | {"family": "mistral", "window": window})


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return write_sizes(spec, "mistral", "MistralForCausalLM") | {
        "hidden_act": "silu",
        "sliding_window": spec.window or None,
        **write_rope(spec),
    }
