"""DeepSeek-V2 and V3 (2024): multi-head latent attention, many small experts, some of them shared.

Shapes: D width, H heads, C width of a head's unrotated part, R of its rotated part, K = C + R, E width of its values,
Z width of the keys' and values' latent vector, Q of the queries' (or D).
"""

from functools import partial
from typing import Any

import numpy as np

from meshwright.models.expert_rules import expert_rules, gated_rules
from meshwright.models.hf import Fields, refusal
from meshwright.models.hf_keys import read_rope, read_sizes, write_rope, write_sizes
from meshwright.models.llama import outer_rules
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, linear, transposed


def _deepseek(**sizes: Any) -> ModelSpec:
    alike = {"attention": "latent", "positions": "rotary", "norm": "rmsnorm", "norm_eps": 1e-6, "bias": False}
    return ModelSpec(family="deepseek", activation="swiglu", tied_embeddings=False, **alike | sizes)


_V3: dict[str, Any] = {"router": "sigmoid", "router_bias": True, "shared_experts": 1}

PRESETS = {
    "deepseek-tiny": _deepseek(
        **_V3,
        layers=4,
        width=128,
        heads=4,
        head_width=32,
        rotary_width=16,
        kv_latent=64,
        query_latent=96,
        ffn_width=128,
        experts=4,
        context_length=256,
    ),
    "deepseek-1b": _deepseek(
        **_V3,
        layers=16,
        width=1024,
        heads=16,
        head_width=64,
        rotary_width=32,
        kv_latent=256,
        query_latent=512,
        ffn_width=2048,
        experts=8,
        context_length=4096,
    ),
    "deepseek-v2-lite": _deepseek(
        layers=27,
        width=2048,
        heads=16,
        head_width=128,
        rotary_width=64,
        kv_latent=512,
        ffn_width=1408,
        experts=64,
        experts_per_token=6,
        shared_experts=2,
        renormalize=False,
        dense_layers=1,
        dense_ffn_width=10_944,
        context_length=163_840,
        rope_scaling="yarn",
        rope_factor=40.0,
        rope_original_length=4096,
        rope_mscale=0.707,
        rope_mscale_all=0.707,
    ),
    "deepseek-v3": _deepseek(
        **_V3,
        layers=61,
        width=7168,
        heads=128,
        head_width=128,
        rotary_width=64,
        kv_latent=512,
        query_latent=1536,
        ffn_width=2048,
        experts=256,
        experts_per_token=8,
        router_groups=8,
        router_groups_used=4,
        router_group_score="top2",
        router_scale=2.5,
        dense_layers=3,
        dense_ffn_width=18_432,
        context_length=163_840,
        rope_scaling="yarn",
        rope_factor=40.0,
        rope_original_length=4096,
        rope_mscale=1.0,
        rope_mscale_all=1.0,
    ),
}

_CHANGE_NOTHING = (
    "aux_loss_alpha seq_aux ep_size router_aux_loss_coef num_nextn_predict_layers num_mtp_layers head_dim qk_head_dim"
).split()


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` of V2 or V3 says; raises `UserError` where it can't be represented."""
    fields, third = Fields(config, _CHANGE_NOTHING), config["model_type"] == "deepseek_v3"
    spec = read_sizes(fields, eps=1e-6, tied=False) | read_rope(fields)
    fields.expect("num_key_value_heads", spec["heads"])
    fields.expect("hidden_act", "silu", "swish")
    fields.expect("attention_bias", False)
    fields.expect("mlp_bias", False)
    fields.expect("rope_interleave", True)
    fields.expect("rms_norm_eps", 1e-6)  # the norms of latent vectors have that whatever is said here
    growth = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if growth.get("mscale_all_dim") and not growth.get("mscale"):
        raise refusal("mscale_all_dim", growth["mscale_all_dim"], "must be there with mscale, or neither")
    head_width, value_width = fields.take("qk_nope_head_dim"), fields.take("v_head_dim")
    spec |= {
        "family": "deepseek",
        "attention": "latent",
        "head_width": head_width,
        "rotary_width": fields.take("qk_rope_head_dim"),
        "value_width": 0 if value_width == head_width else value_width,
        "kv_latent": fields.take("kv_lora_rank"),
        "query_latent": 0 if fields.is_null("q_lora_rank") else fields.take("q_lora_rank", 1536),
        **_feed_forward(fields, third, spec["layers"]),
    }
    fields.done()
    return ModelSpec(**spec)


def _feed_forward(fields: Fields, third: bool, layers: int) -> dict[str, Any]:
    dense, width = fields.take("first_k_dense_replace", 3 if third else 0), fields.take("intermediate_size")
    fields.expect("moe_layer_freq", 1)
    fields.expect("scoring_func", "sigmoid" if third else "softmax")
    if third:
        fields.expect("topk_method", "noaux_tc")
        method, renormalize = "noaux_tc", fields.take("norm_topk_prob", True)
    else:
        fields.expect("norm_topk_prob", False)
        fields.expect("topk_method", "greedy", "group_limited_greedy")
        method, renormalize = fields.take("topk_method", "greedy"), False
    groups, used = fields.take("n_group", 8 if third else 1), fields.take("topk_group", 4 if third else 1)
    groups, used = (1, 1) if method == "greedy" else (groups, used)
    experts = {
        "experts": fields.take("n_routed_experts"),
        "experts_per_token": fields.take("num_experts_per_tok"),
        "shared_experts": fields.take("n_shared_experts"),
        "ffn_width": fields.take("moe_intermediate_size"),
        "router_groups": groups,
        "router_groups_used": used,
        "router_group_score": "top2" if third and groups > 1 else "max",
        "router_scale": fields.take("routed_scaling_factor", 2.5 if third else 1.0),
        "router_bias": third,
        "renormalize": renormalize,
        "router": "sigmoid" if third else "softmax",
        "dense_layers": dense,
        "dense_ffn_width": width if dense else 0,
    }
    return experts if dense < layers else {"ffn_width": width, "router": experts["router"]}


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture: of V3 where the router's scores go through a sigmoid, else of V2."""
    third = spec.router == "sigmoid"
    names = ("deepseek_v3", "DeepseekV3ForCausalLM") if third else ("deepseek_v2", "DeepseekV2ForCausalLM")
    config = write_sizes(spec, *names) | {
        "head_dim": spec.rotary_width,
        "qk_nope_head_dim": spec.head_width,
        "qk_rope_head_dim": spec.rotary_width,
        "v_head_dim": spec.value_width or spec.head_width,
        "kv_lora_rank": spec.kv_latent,
        "q_lora_rank": spec.query_latent or None,
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        **write_rope(spec),
        "first_k_dense_replace": spec.dense_layers if spec.experts else spec.layers,
        "intermediate_size": spec.dense_ffn_width if spec.dense_layers else spec.ffn_width,
        "moe_intermediate_size": spec.ffn_width,
        "moe_layer_freq": 1,
        "n_routed_experts": max(spec.experts, 1),
        "num_experts_per_tok": spec.experts_per_token,
        "n_shared_experts": spec.shared_experts,
        "n_group": spec.router_groups,
        "topk_group": spec.router_groups_used,
        "routed_scaling_factor": spec.router_scale,
    }
    if third:
        more = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": spec.renormalize}
        return config | more | {"rope_interleave": True, "num_nextn_predict_layers": 0}
    method = "greedy" if spec.router_groups == 1 else "group_limited_greedy"
    return config | {"topk_method": method, "scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False}


def weights(spec: ModelSpec) -> list[Rule]:
    """One rule for each tensor of a checkpoint of DeepSeek-V2 or V3, or for each of its parts."""
    rules = outer_rules(spec)
    layer = "model.layers.{layer}"
    if spec.dense_layers:
        rules += _layer_rules(spec, "dense_blocks", 0)
        rules += gated_rules("dense_blocks.mlp", f"{layer}.mlp")
    first = spec.dense_layers
    rules += _layer_rules(spec, "blocks", first)
    if not spec.experts:
        return rules + gated_rules("blocks.mlp", f"{layer}.mlp")
    gate = f"{layer}.mlp.gate"
    rules.append(Rule("blocks.mlp.router", f"{gate}.weight", transposed, transposed, first_layer=first))
    if spec.router_bias:
        rules.append(Rule("blocks.mlp.router_bias", f"{gate}.e_score_correction_bias", first_layer=first))
    if spec.shared_experts:
        rules += gated_rules("blocks.mlp.shared", f"{layer}.mlp.shared_experts", first_layer=first)
    return rules + expert_rules(spec, f"{layer}.mlp.experts")


def _layer_rules(spec: ModelSpec, stack: str, first: int) -> list[Rule]:
    """The rules of norms and attention."""
    ours, theirs = f"{stack}.attention", "model.layers.{layer}.self_attn"
    heads, latent, unrotated = spec.heads, spec.kv_latent, spec.head_width
    both, joint = f"{theirs}.kv_a_proj_with_mqa.weight", f"{theirs}.kv_b_proj.weight"
    rotated, whole = slice(latent, latent + spec.rotary_width), unrotated + (spec.value_width or unrotated)
    join, cut = _heads_joined, partial(_heads_cut, heads=heads)
    query = f"{theirs}.q_b_proj.weight" if spec.query_latent else f"{theirs}.q_proj.weight"
    to_query, from_query = partial(_to_query, unrotated=unrotated), partial(_from_query, heads=heads, cut=unrotated)
    rules = [
        Rule(f"{stack}.attention_norm.scale", "model.layers.{layer}.input_layernorm.weight"),
        Rule(f"{stack}.mlp_norm.scale", "model.layers.{layer}.post_attention_layernorm.weight"),
        Rule(f"{ours}.query.kernel", query, to_query, from_query, heads=heads),
        Rule(f"{ours}.kv_latent.kernel", both, transposed, transposed, slice(0, latent), axis=0),
        Rule(f"{ours}.rotated_key.kernel", both, _to_halves_turned, _to_pairs_turned, rotated, axis=0),
        Rule(f"{ours}.kv_norm.scale", f"{theirs}.kv_a_layernorm.weight"),
        Rule(f"{ours}.key.kernel", joint, join, cut, slice(0, unrotated), axis=1, heads=heads),
        Rule(f"{ours}.value.kernel", joint, join, cut, slice(unrotated, whole), axis=1, heads=heads),
        *linear(f"{ours}.out", f"{theirs}.o_proj"),
    ]
    if spec.query_latent:
        rules += linear(f"{ours}.query_latent", f"{theirs}.q_a_proj")
        rules.append(Rule(f"{ours}.query_norm.scale", f"{theirs}.q_a_layernorm.weight"))
    return [rule._replace(first_layer=first) for rule in rules]


def _to_halves(x_RD: np.ndarray) -> np.ndarray:
    # They turn neighbours, we turn a place of the first half with one of the second.
    return np.concatenate([x_RD[..., 0::2, :], x_RD[..., 1::2, :]], axis=-2)


def _to_pairs(x_RD: np.ndarray) -> np.ndarray:
    return np.stack(np.split(x_RD, 2, axis=-2), axis=-2).reshape(x_RD.shape)


def _to_halves_turned(x_RD: np.ndarray) -> np.ndarray:
    return _to_halves(x_RD).T


def _to_pairs_turned(x_DR: np.ndarray) -> np.ndarray:
    return _to_pairs(x_DR.T)


def _heads_joined(x_HCZ: np.ndarray) -> np.ndarray:
    return x_HCZ.reshape(-1, x_HCZ.shape[-1]).T


def _heads_cut(x_ZHC: np.ndarray, heads: int) -> np.ndarray:
    return x_ZHC.T.reshape(heads, -1, len(x_ZHC))


def _to_query(x_HKQ: np.ndarray, unrotated: int) -> np.ndarray:
    return _heads_joined(np.concatenate([x_HKQ[:, :unrotated], _to_halves(x_HKQ[:, unrotated:])], axis=1))


def _from_query(x_QHK: np.ndarray, heads: int, cut: int) -> np.ndarray:
    x_HKQ = _heads_cut(x_QHK, heads)
    return np.concatenate([x_HKQ[:, :cut], _to_pairs(x_HKQ[:, cut:])], axis=1)
