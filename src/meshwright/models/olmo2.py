"""OLMo 2 (2025): Llama with norms after each part, and of all queries and of all keys together."""

from typing import Any

from meshwright.models.hf import Fields
from meshwright.models.hf_keys import read_rope, read_sizes, write_rope, write_sizes
from meshwright.models.llama import PRESETS as LLAMA
from meshwright.models.llama import attention_rules, mlp_rules, norm_rules, outer_rules
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule

_OLMO2 = {"family": "olmo2", "qk_norm": "all", "norm_placement": "after"}


def _olmo2(**changes: Any) -> ModelSpec:
    tiny = LLAMA["llama-tiny"].model_dump()
    return ModelSpec(**tiny | _OLMO2 | {"norm_eps": 1e-6, "rope_theta": 500_000.0, "tied_embeddings": False} | changes)


PRESETS = {
    "olmo2-tiny": _olmo2(),
    "olmo2-1b": _olmo2(
        layers=16, width=2048, heads=16, kv_heads=16, head_width=128, ffn_width=8192, context_length=4096
    ),
    "olmo2-7b": _olmo2(
        layers=32, width=4096, heads=32, kv_heads=32, head_width=128, ffn_width=11_008, context_length=4096
    ),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields(config)
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("attention_bias", False)
    spec = read_sizes(fields, eps=1e-5, tied=False) | read_rope(fields)
    fields.done()
    return ModelSpec(**spec | _OLMO2)


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return write_sizes(spec, "olmo2", "Olmo2ForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": False,
        **write_rope(spec),
    }


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every parameter."""
    norms = {"attention_norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
    return [*outer_rules(spec), *attention_rules(spec), *mlp_rules(spec), *norm_rules(norms)]
