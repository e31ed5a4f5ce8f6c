"""Qwen3-MoE (2025): Qwen3 with a mixture of many small experts in place of the feed-forward part."""

from typing import Any

from meshwright.models.expert_rules import expert_rules
from meshwright.models.hf import Fields
from meshwright.models.hf_keys import read_rope, read_sizes, write_rope, write_sizes
from meshwright.models.llama import attention_rules, norm_rules, outer_rules
from meshwright.models.qwen3 import PRESETS as QWEN3
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, transposed


def _qwen3_moe(**changes: Any) -> ModelSpec:
    return ModelSpec(**QWEN3["qwen3-tiny"].model_dump() | {"family": "qwen3_moe"} | changes)


PRESETS = {
    "qwen3-moe-tiny": _qwen3_moe(experts=8, ffn_width=64),
    "qwen3-30b-a3b": _qwen3_moe(
        layers=48,
        width=2048,
        heads=32,
        kv_heads=4,
        head_width=128,
        ffn_width=768,
        experts=128,
        experts_per_token=8,
        context_length=40_960,
        tied_embeddings=False,
    ),
}

_CHANGE_NOTHING = ("intermediate_size", "max_window_layers", "router_aux_loss_coef")


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields(config, _CHANGE_NOTHING)
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("attention_bias", False)
    fields.expect("decoder_sparse_step", 1)
    fields.expect("mlp_only_layers", [])
    spec = read_sizes(fields, eps=1e-6, tied=False, all_heads=False) | read_rope(fields)
    window, slides = fields.take("sliding_window", 0), fields.take("use_sliding_window", False)
    spec |= {
        "family": "qwen3_moe",
        "qk_norm": "head",
        "window": window if slides else 0,
        "ffn_width": fields.take("moe_intermediate_size"),
        "experts": fields.take("num_local_experts" if "num_local_experts" in fields else "num_experts"),
        "experts_per_token": fields.take("num_experts_per_tok"),
        "renormalize": fields.take("norm_topk_prob", False),
    }
    fields.done()
    return ModelSpec(**spec)


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return write_sizes(spec, "qwen3_moe", "Qwen3MoeForCausalLM") | {
        "hidden_act": "silu",
        "attention_bias": False,
        "moe_intermediate_size": spec.ffn_width,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": spec.experts,
        "num_experts_per_tok": spec.experts_per_token,
        "norm_topk_prob": spec.renormalize,
        "use_sliding_window": bool(spec.window),
        "sliding_window": spec.window or None,
        **write_rope(spec),
    }


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every parameter."""
    norms = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    theirs = "model.layers.{layer}.mlp"
    router = Rule("blocks.mlp.router", f"{theirs}.gate.weight", transposed, transposed)
    experts = expert_rules(spec, f"{theirs}.experts")
    return [*outer_rules(spec), *attention_rules(spec), router, *experts, *norm_rules(norms)]
