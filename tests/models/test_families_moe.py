"""Every family with experts against transformers: logits, one step's gradients, decoding, configs and tensors."""

import json
from functools import cache

import jax
import numpy as np
import pytest
from families import Parity, decoded, error, filled, our_gradients, our_logits, their_step, theirs, tokens, unfilled

from meshwright.errors import UserError
from meshwright.models import hf
from meshwright.models.spec import preset, presets
from meshwright.models.weights import present

_COMMON = {
    "hidden_size": 40,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_QWEN = {**_COMMON, "head_dim": 12, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.5,
    "mscale_all_dim": 0.8,
}
_LATENT = {
    **_COMMON,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}

CASES = {
    "mixtral": ("mixtral", {**_COMMON, "num_local_experts": 4}),
    "mixtral, sliding": ("mixtral", {**_COMMON, "num_local_experts": 4, "sliding_window": 5, "head_dim": 12}),
    "qwen3_moe": ("qwen3_moe", _QWEN),
    "qwen3_moe, renormalised": (
        "qwen3_moe",
        {**_QWEN, "norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 5},
    ),
    "deepseek_v2, greedy": (
        "deepseek_v2",
        {**_LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "num_hidden_layers": 2},
    ),
    "deepseek_v2, groups, yarn": (
        "deepseek_v2",
        {
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": _YARN,
        },
    ),
    "deepseek_v3, groups, yarn": (
        "deepseek_v3",
        {**_LATENT, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "rope_parameters": _YARN},
    ),
    "deepseek_v3, no groups": (
        "deepseek_v3",
        {
            **_LATENT,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.3,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2,
            "v_head_dim": 8,
        },
    ),
    "deepseek_v3, dense": ("deepseek_v3", {**_LATENT, "first_k_dense_replace": 2, "num_hidden_layers": 2}),
}


DECODED = ["mixtral, sliding", "qwen3_moe", "deepseek_v2, groups, yarn", "deepseek_v3, no groups"]


@cache
def case(name: str) -> Parity:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import torch

    model_type, keys = CASES[name]
    model = theirs(model_type, **keys)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape))
    spec = hf.spec_from_hf(json.loads(json.dumps(model.config.to_dict())))
    tensors = {key: value.detach().numpy() for key, value in model.state_dict().items()}
    rules = present(hf.weights(spec), tensors.__contains__)
    return Parity(model, spec, rules, tensors, filled(spec, rules, tensors))


@cache
def step(name: str):
    """Logits and gradients of transformers, and how near to each other the scores of any two experts come."""
    nearest = [np.inf]

    def watch(module, arguments, output):
        logits = output[0].detach().numpy()
        gone = getattr(module, "e_score_correction_bias", None)
        wanted = logits if gone is None else 1 / (1 + np.exp(-logits)) + gone.numpy()
        nearest.append(np.diff(np.sort(wanted, axis=-1), axis=-1).min())

    gates = [module for name, module in case(name).model.named_modules() if name.endswith("mlp.gate")]
    hooks = [gate.register_forward_hook(watch) for gate in gates]
    logits, gradients = their_step(case(name).model, tokens())
    for hook in hooks:
        hook.remove()
    return logits, gradients, min(nearest)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal(name):
    it, (want, _, nearest) = case(name), step(name)
    assert nearest > 1e-5, "two experts are nearly equal: their order may differ for rounding alone"
    got = our_logits(it.spec, it.params, tokens())
    assert np.abs(want).max() > 1
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_one_step_equal(name):
    it, (_, gradients, _) = case(name), step(name)
    bias = {key: np.zeros_like(value) for key, value in it.tensors.items() if key not in gradients}
    assert all(key.endswith("e_score_correction_bias") for key in bias)
    want = filled(it.spec, it.rules, gradients | bias)
    _, got = our_gradients(it.spec, it.params, tokens())
    leaves, structure = jax.tree_util.tree_flatten_with_path(got)
    assert structure == jax.tree.structure(want)
    errors = {}
    for (path, ours), of_theirs in zip(leaves, jax.tree.leaves(want), strict=True):
        key = jax.tree_util.keystr(path, simple=True, separator=".")
        if key.endswith("router_bias"):
            assert not np.any(ours)
            continue
        layers = np.abs(ours) if "blocks" in key else np.abs(ours)[None]
        assert (layers.reshape(len(layers), -1).max(axis=1) > 0).all(), key
        errors[key] = error(ours, of_theirs)
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("name", DECODED)
def test_decoding_with_a_cache_equals_the_whole_text(name):
    it, (want, _, _) = case(name), step(name)
    np.testing.assert_allclose(decoded(it.spec, it.params, tokens()), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_by_transformers_and_by_us(name, tmp_path):
    import torch
    from safetensors.numpy import load_file, save_file
    from transformers import AutoModelForCausalLM

    it, (want, _, _) = case(name), step(name)
    written, rules = json.loads(json.dumps(hf.hf_from_spec(it.spec))), hf.weights(it.spec)
    assert hf.spec_from_hf(written) == it.spec
    made = {key: np.ascontiguousarray(value) for key, value in unfilled(rules, it.params).items()}
    save_file(made, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(written))
    options = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert not any(report.values()), report
    assert [type(model).__name__] == written["architectures"]
    with torch.no_grad():
        np.testing.assert_allclose(model.eval()(torch.tensor(tokens())).logits.numpy(), want, rtol=0, atol=2e-6)

    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert {key: value.shape for key, value in saved.items()} == {key: value.shape for key, value in made.items()}
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert hf.spec_from_hf(config) == it.spec
    assert hf.unread_tensors(saved, rules, hf.family_of(config), it.spec) == []
    again = filled(it.spec, present(rules, saved.__contains__), saved)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, again, it.params)))


FAULTS = {
    "mixtral": {"renormalize": False},
    "mixtral, sliding": {"window": 6},
    "qwen3_moe": {"renormalize": True},
    "deepseek_v2, groups, yarn": {"router_group_score": "top2"},
    "deepseek_v3, groups, yarn": {"router_group_score": "max"},
    "deepseek_v3, no groups": {"renormalize": True},
}
MORE_FAULTS = {
    "deepseek_v2, groups, yarn": [
        {"router_groups_used": 3},
        {"router_groups": 1, "router_groups_used": 1},
        {"router_scale": 1.0},
        {"rope_mscale": 0.8},
        {"rope_mscale_all": 0.0},
    ],
    "deepseek_v3, groups, yarn": [{"router_groups_used": 3}, {"router": "softmax"}, {"rope_scaling": "none"}],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [*FAULTS.items(), *((name, change) for name, changes in MORE_FAULTS.items() for change in changes)],
)
def test_each_choice_matters(name, change):
    it, (want, _, _) = case(name), step(name)
    spec = it.spec.model_copy(update=change)
    assert np.abs(our_logits(spec, it.params, tokens(), scan_layers=True) - want).max() > 1e-3


def test_the_bias_changes_who_is_chosen_alone():
    it, (want, _, _) = case("deepseek_v3, no groups"), step("deepseek_v3, no groups")
    mlp = it.params["blocks"]["mlp"]

    def logits(bias):
        params = it.params | {"blocks": it.params["blocks"] | {"mlp": mlp | {"router_bias": bias}}}
        return our_logits(it.spec, params, tokens())

    assert np.abs(logits(np.zeros_like(mlp["router_bias"])) - want).max() > 1e-3
    np.testing.assert_allclose(logits(mlp["router_bias"] + 5.0), want, rtol=0, atol=1e-5)


def test_rows_of_neighbours_must_go_into_halves():
    it, (want, _, _) = case("deepseek_v2, greedy"), step("deepseek_v2, greedy")
    attention = it.params["blocks"]["attention"]
    kernel, half = attention["rotated_key"]["kernel"], it.spec.rotary_width // 2
    neighbours = np.stack([kernel[..., :half], kernel[..., half:]], axis=-1).reshape(kernel.shape)
    wrong = attention | {"rotated_key": {"kernel": neighbours}}
    params = it.params | {"blocks": it.params["blocks"] | {"attention": wrong}}
    assert np.abs(our_logits(it.spec, params, tokens()) - want).max() > 1e-3


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 97,
    **_COMMON,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN = {"model_type": "qwen3_moe", "vocab_size": 97, **_QWEN}
V2 = {"model_type": "deepseek_v2", "vocab_size": 97, **_LATENT}
V3 = {"model_type": "deepseek_v3", "vocab_size": 97, **_LATENT, "n_group": 4, "topk_group": 2}
REFUSED = [
    (MIXTRAL, "hidden_act", "gelu"),
    (MIXTRAL, "attention_bias", True),
    (QWEN, "decoder_sparse_step", 2),
    (QWEN, "mlp_only_layers", [0]),
    (QWEN, "attention_bias", True),
    (QWEN, "hidden_act", "relu6"),
    (V2, "norm_topk_prob", True),
    (V2, "topk_method", "noaux_tc"),
    (V2, "scoring_func", "sigmoid"),
    (V2, "rms_norm_eps", 1e-5),
    (V2, "moe_layer_freq", 2),
    (V2, "mlp_bias", True),
    (V2, "num_key_value_heads", 2),
    (V3, "rope_interleave", False),
    (V3, "topk_method", "greedy"),
    (V3, "scoring_func", "softmax"),
    (V3, "attention_bias", True),
    (V3, "quantization_config", {"quant_method": "fp8"}),
    (V3, "something_new", 1),
]


@pytest.mark.parametrize(("config", "key", "value"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_cannot_be_represented_is_refused_by_its_key(config, key, value):
    hf.spec_from_hf(config)
    with pytest.raises(UserError, match=rf"config\.json: {key} = "):
        hf.spec_from_hf({**config, key: value})


def test_half_of_what_yarn_needs_is_refused():
    growth = {key: value for key, value in _YARN.items() if key != "mscale"}
    with pytest.raises(UserError, match=r"config\.json: mscale_all_dim = 0\.8"):
        hf.spec_from_hf({**V2, "rope_parameters": growth})
    assert hf.spec_from_hf({**V2, "rope_parameters": _YARN}).rope_mscale_all == 0.8


def test_configs_of_published_checkpoints():
    v3 = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "attention_bias": False,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    spec = hf.spec_from_hf(v3)
    assert spec == preset("deepseek-v3").model_copy(update={"vocab_size": 129280})
    rules, family = hf.weights(spec), hf.family_of(v3)
    further = [
        "model.layers.61.eh_proj.weight",
        "model.layers.61.mlp.gate.weight",
        "model.layers.61.shared_head.norm.weight",
    ]
    assert hf.unread_tensors(further, rules, family, spec) == []
    assert hf.unread_tensors(["model.layers.62.mlp.gate.weight"], rules, family, spec) != []


@pytest.mark.parametrize("name", [name for name, spec in presets().items() if spec.experts])
def test_every_preset_has_a_config(name):
    spec = preset(name).model_copy(update={"vocab_size": 97})
    assert hf.spec_from_hf(hf.hf_from_spec(spec)) == spec


@pytest.mark.parametrize(
    ("name", "change", "key"),
    [
        ("moe-tiny", {"renormalize": False}, "renormalize"),
        ("moe-tiny", {"shared_experts": 1}, "shared_experts"),
        ("qwen3-moe-tiny", {"router": "sigmoid"}, "router"),
        ("deepseek-tiny", {"router_bias": False}, "router_bias"),
        ("deepseek-tiny", {"norm_eps": 1e-5}, "norm_eps"),
        ("deepseek-v2-lite", {"renormalize": True}, "renormalize"),
    ],
)
def test_what_a_family_cannot_say_is_not_written(name, change, key):
    spec = preset(name).model_copy(update={"vocab_size": 97, **change})
    with pytest.raises(UserError, match=rf"model\.{key} = "):
        hf.hf_from_spec(spec)
