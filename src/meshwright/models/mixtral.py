"""Mixtral (Jiang et al., 2024): Llama with a mixture of experts in place of the feed-forward part."""

from typing import Any

from meshwright.models.expert_rules import expert_rules
from meshwright.models.hf import Fields
from meshwright.models.hf_keys import read_rope, read_sizes, write_rope, write_sizes
from meshwright.models.llama import PRESETS as LLAMA
from meshwright.models.llama import attention_rules, norm_rules, outer_rules
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, transposed


def _mixtral(base: str, **changes: object) -> ModelSpec:
    return ModelSpec(**{**LLAMA[base].model_dump(), "family": "mixtral", **changes})


PRESETS = {
    "moe-tiny": _mixtral("llama-tiny", experts=4, ffn_width=176),
    "moe-1b": _mixtral("llama-1b", experts=8, width=1024, heads=16, kv_heads=8, head_width=64, ffn_width=2304),
    "mixtral-8x7b": _mixtral(
        "llama-1b",
        layers=32,
        width=4096,
        heads=32,
        kv_heads=8,
        head_width=128,
        ffn_width=14_336,
        experts=8,
        context_length=32_768,
        rope_theta=1_000_000.0,
        tied_embeddings=False,
    ),
}

_THETA = 1_000_000.0  # of a config that doesn't say


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields({"rope_theta": _THETA, **config}, ("router_aux_loss_coef", "router_jitter_noise"))
    fields.expect("hidden_act", "silu", "swish")
    spec = read_sizes(fields, eps=1e-5, tied=False, all_heads=False) | read_rope(fields)
    spec |= {
        "family": "mixtral",
        "window": fields.take("sliding_window", 0),
        "experts": fields.take("num_local_experts", 8),
        "experts_per_token": fields.take("num_experts_per_tok", 2),
    }
    fields.done()
    return ModelSpec(**spec)


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return write_sizes(spec, "mixtral", "MixtralForCausalLM") | {
        "hidden_act": "silu",
        "num_local_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "sliding_window": spec.window or None,
        **write_rope(spec),
    }


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every parameter."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    theirs = "model.layers.{layer}.block_sparse_moe"
    beside_whole = Rule("blocks.mlp.router", "model.layers.{layer}.mlp.gate.weight", transposed, transposed)
    router = beside_whole._replace(theirs=f"{theirs}.gate.weight", otherwise=beside_whole)
    experts = expert_rules(spec, f"{theirs}.experts", names=("w1", "w3", "w2"))
    return [*outer_rules(spec), *attention_rules(spec), router, *experts, *norm_rules(norms)]
