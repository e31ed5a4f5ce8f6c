"""Configs as checkpoints hold them, of transformers 5 and before, and those that can't be represented."""

import pytest

from meshwright.errors import UserError
from meshwright.models import hf
from meshwright.models.decoder import parameter_count
from meshwright.models.spec import ModelSpec, preset
from meshwright.models.weights import Rule

_OLD = {"torch_dtype": "bfloat16", "transformers_version": "4.40.0", "use_cache": True, "initializer_range": 0.02}

# Each as its publisher wrote it but for what names or dates it, with the preset and the count of parameters.
PUBLISHED = {
    "gpt2": (
        "gpt2",
        124_439_808,
        {
            "model_type": "gpt2",
            "activation_function": "gelu_new",
            "architectures": ["GPT2LMHeadModel"],
            "attn_pdrop": 0.1,
            "bos_token_id": 50256,
            "embd_pdrop": 0.1,
            "eos_token_id": 50256,
            "initializer_range": 0.02,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 1024,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "resid_pdrop": 0.1,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "cls_index",
            "summary_use_proj": True,
            "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
            "vocab_size": 50257,
        },
    ),
    "SmolLM2-135M": (
        "smollm2-135m",
        134_515_008,
        {
            **_OLD,
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 576,
            "intermediate_size": 1536,
            "is_llama_config": True,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_interleaved": False,
            "rope_scaling": None,
            "rope_theta": 100000,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
    ),
    "Llama-3.2-1B": (
        "llama3.2-1b",
        1_235_814_400,
        {
            **_OLD,
            "model_type": "llama",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "vocab_size": 128256,
        },
    ),
    "Qwen2.5-0.5B": (
        "qwen2.5-0.5b",
        494_032_768,
        {
            **_OLD,
            "model_type": "qwen2",
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "max_position_embeddings": 32768,
            "max_window_layers": 24,
            "num_attention_heads": 14,
            "num_hidden_layers": 24,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "use_mrope": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-0.6B": (
        "qwen3-0.6b",
        596_049_920,
        {
            **_OLD,
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "max_position_embeddings": 40960,
            "max_window_layers": 28,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
    ),
    "Mistral-7B-v0.1": (
        "mistral-7b",
        7_241_732_096,
        {
            **_OLD,
            "model_type": "mistral",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
    ),
    "gemma-2-2b": (
        "gemma2-2b",
        2_614_341_888,
        {
            **_OLD,
            "model_type": "gemma2",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": 30.0,
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 8192,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000.0,
            "sliding_window": 4096,
            "vocab_size": 256000,
        },
    ),
    "gemma-3-1b": (
        "gemma3-1b",
        999_885_952,
        {
            **_OLD,
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
    ),
    "OLMo-2-0425-1B": (
        "olmo2-1b",
        1_484_916_736,
        {
            **_OLD,
            "model_type": "olmo2",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_presets(name):
    known, count, config = PUBLISHED[name]
    spec = hf.spec_from_hf(config)
    assert parameter_count(spec) == count
    assert spec == preset(known).model_copy(update={"vocab_size": spec.vocab_size, "dropout": spec.dropout})


def test_every_dense_preset_round_trips():
    families = {"gpt2", "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2"}
    names = [name for name, spec in _presets().items() if spec.family in families]
    assert len(names) > 20
    for name in names:
        spec = _presets()[name].model_copy(update={"vocab_size": 300})
        assert hf.spec_from_hf(hf.hf_from_spec(spec)) == spec, name


def _presets():
    from meshwright.models.spec import presets

    return presets()


def config(name: str, **changes):
    return {**PUBLISHED[name][2], **changes}


_TYPES = ["sliding_attention", "full_attention"]
REFUSED = [
    (config("gpt2", activation_function="relu"), "activation_function"),
    (config("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    (config("gpt2", scale_attn_weights=False), "scale_attn_weights"),
    (config("gpt2", add_cross_attention=True), "add_cross_attention"),
    (config("SmolLM2-135M", hidden_act="relu6"), "hidden_act"),
    (config("SmolLM2-135M", attention_bias=True), "attention_bias"),
    (config("SmolLM2-135M", mlp_bias=True), "attention_bias"),
    (config("SmolLM2-135M", rope_interleaved=True), "rope_interleaved"),
    (config("SmolLM2-135M", partial_rotary_factor=0.5), "partial_rotary_factor"),
    (config("SmolLM2-135M", hidden_size=None), "hidden_size"),
    (config("SmolLM2-135M", tie_word_embeddings="yes"), "tie_word_embeddings"),
    (config("SmolLM2-135M", quantization_config={"bits": 4}), "quantization_config"),
    (config("SmolLM2-135M", rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_scaling.rope_type"),
    (config("SmolLM2-135M", rope_scaling={"type": "linear"}), "rope_scaling.factor"),
    (
        config("SmolLM2-135M", rope_parameters={"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}),
        "rope_parameters.attention_factor",
    ),
    (config("SmolLM2-135M", rope_parameters={"rope_type": "llama3", "factor": 2.0}), "rope_parameters.low_freq_factor"),
    (config("Qwen2.5-0.5B", use_mrope=True), "use_mrope"),
    (config("Qwen2.5-0.5B", use_sliding_window=True, max_window_layers=12), "layer_types"),
    (config("Qwen2.5-0.5B", num_key_value_heads=None), "num_key_value_heads"),
    (config("Qwen3-0.6B", attention_bias=True), "attention_bias"),
    (config("Qwen3-0.6B", layer_types=["chunked_attention"] * 28), "layer_types"),
    (config("Mistral-7B-v0.1", hidden_act="gelu"), "hidden_act"),
    (config("gemma-2-2b", hidden_activation="gelu"), "hidden_activation"),
    (config("gemma-2-2b", use_bidirectional_attention=True), "use_bidirectional_attention"),
    (config("gemma-2-2b", layer_types=_TYPES * 12), "layer_types"),
    (config("gemma-2-2b", layer_types=_TYPES * 12 + _TYPES[::-1]), "layer_types"),
    (
        config("gemma-3-1b", rope_parameters={"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
        "rope_parameters.sliding_attention",
    ),
    (config("OLMo-2-0425-1B", attention_bias=True), "attention_bias"),
    (config("OLMo-2-0425-1B", clip_qkv=8.0), "clip_qkv"),
    ({"model_type": "bert"}, "model_type"),
]


@pytest.mark.parametrize(("config", "key"), REFUSED, ids=[f"{c['model_type']}: {key}" for c, key in REFUSED])
def test_what_cannot_be_represented_is_refused_by_name(config, key):
    with pytest.raises(UserError, match=rf"^config.json: {key.replace('.', '[.]')} = "):
        hf.spec_from_hf(config)


def test_what_a_family_cannot_hold_is_refused_by_name():
    small = {"vocab_size": 300, "window": 8}
    for name, changes, key in [
        ("llama-tiny", small, "window"),
        ("llama-tiny", {"vocab_size": 300, "qk_norm": "head"}, "qk_norm"),
        ("gpt2-tiny", {"vocab_size": 300, "head_width": 64}, "head_width"),
        ("gemma2-tiny", {"vocab_size": 300, "embedding_scale": 2.0}, "embedding_scale"),
        ("minigpt-tiny", {"vocab_size": 300}, "family"),
        ("moe-tiny", {"vocab_size": 300, "experts": 0}, "experts"),
    ]:
        with pytest.raises(UserError, match=rf"^model[.]{key} = "):
            hf.hf_from_spec(preset(name).model_copy(update=changes))


@pytest.mark.parametrize("name", ["llama3.2-1b", "qwen2.5-0.5b", "mistral-7b", "gemma2-2b", "gemma3-1b", "deepseek-v3"])
def test_rotary_positions_are_told_to_older_versions_too(name):
    spec = preset(name).model_copy(update={"vocab_size": 300})
    written = hf.hf_from_spec(spec)
    assert written["rope_theta"] == spec.rope_theta
    assert written.get("rope_scaling", {}).get("factor", 1.0) == spec.rope_factor
    assert written.get("rope_local_base_freq", 0.0) == spec.local_rope_theta
    older = {key: value for key, value in written.items() if key != "rope_parameters"}
    newer = {key: value for key, value in written.items() if key == "rope_parameters" or not key.startswith("rope_")}
    assert hf.spec_from_hf(older) == hf.spec_from_hf(newer) == hf.spec_from_hf(written)


def test_null_and_absence_differ_where_they_do_for_transformers():
    absent = {key: value for key, value in config("Mistral-7B-v0.1").items() if key != "sliding_window"}
    assert hf.spec_from_hf(absent).window == 4096
    assert hf.spec_from_hf({**absent, "sliding_window": None}).window == 0
    gemma = config("gemma-2-2b")
    del gemma["final_logit_softcapping"]
    assert hf.spec_from_hf(gemma).final_softcap == 30.0
    assert hf.spec_from_hf({**gemma, "final_logit_softcapping": None}).final_softcap == 0.0


def test_the_text_part_of_a_model_that_reads_images():
    text = config("gemma-3-1b")
    short = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = hf.spec_from_hf({"model_type": "gemma3", "text_config": short})  # of the 4B model
    assert parameter_count(spec) == 3_880_263_168
    assert (spec.rope_factor, spec.window, spec.local_rope_theta) == (8.0, 1024, 10_000.0)
    whole = {"model_type": "gemma3", "vision_config": {"hidden_size": 1152}, "text_config": text}
    assert hf.spec_from_hf(whole) == hf.spec_from_hf(text)
    family = hf.family_of(whole)
    assert family.module == "gemma3"
    for there in ("language_model.model.norm.weight", "model.language_model.norm.weight"):
        assert hf.tensor_name("model.norm.weight", {there}, family) == there


def test_names_of_tensors_without_a_head_and_those_of_no_use():
    spec = hf.spec_from_hf(config("gpt2"))
    family, rules = hf.family_of(config("gpt2")), hf.weights(spec)
    names = {rule.theirs.format(layer=layer) for rule in rules for layer in range(12)}
    bare = {name.removeprefix("transformer.") for name in names}
    assert hf.tensor_name("transformer.wte.weight", bare, family) == "wte.weight"
    assert hf.tensor_name("transformer.wte.weight", {"other"}, family) is None
    more = {"h.0.attn.bias", "lm_head.weight"}
    assert hf.unread_tensors(bare | more, rules, family, spec) == []
    assert hf.unread_tensors(bare | {"h.0.attn.extra"}, rules, family, spec) == ["h.0.attn.extra"]


def test_numbers_of_layers_and_parts_of_tensors():
    rule = Rule("blocks.x", "layers.{layer}.experts.{expert}.w", first_layer=2)
    assert rule.stacked == 2
    assert list(rule.tensors((2, 2, 5))) == [
        ((0, 0), "layers.2.experts.0.w"),
        ((0, 1), "layers.2.experts.1.w"),
        ((1, 0), "layers.3.experts.0.w"),
        ((1, 1), "layers.3.experts.1.w"),
    ]
    assert isinstance(hf.weights(ModelSpec(vocab_size=10))[0], Rule)
