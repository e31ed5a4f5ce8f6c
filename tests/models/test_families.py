"""Every dense family against transformers: logits, one step's gradients, decoding, and configs both ways."""

import json
from functools import cache

import numpy as np
import pytest
from families import Parity, decoded, error, our_gradients, our_logits, pair, their_step, tokens, unfilled

from meshwright.models import hf

pytest.importorskip("torch")
pytest.importorskip("transformers")

_COMMON = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_OWN_WIDTH = {**_COMMON, "head_dim": 12}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
_SLIDING, _FULL = "sliding_attention", "full_attention"
_GEMMA = {**_OWN_WIDTH, "query_pre_attn_scalar": 20, "sliding_window": 5}

CASES = {
    "gpt2": ("gpt2", {"n_embd": 40, "n_layer": 2, "n_head": 4, "n_inner": 56, "n_positions": 64}),
    "gpt2, untied": (
        "gpt2",
        {"n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 64, "tie_word_embeddings": False},
    ),
    "llama": ("llama", _OWN_WIDTH),
    "llama, tied, llama3": ("llama", {**_COMMON, "tie_word_embeddings": True, "rope_parameters": _LLAMA3}),
    "llama, linear, biases": (
        "llama",
        {
            **_COMMON,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama, yarn": ("llama", {**_COMMON, "rope_parameters": _YARN}),
    "llama, yarn with mscale": (
        "llama",
        {**_COMMON, "rope_parameters": {**_YARN, "mscale": 1.5, "mscale_all_dim": 0.5, "beta_fast": 8.0}},
    ),
    "qwen2": ("qwen2", _COMMON),
    "qwen2, sliding": (
        "qwen2",
        {
            **_COMMON,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 0,
        },
    ),
    "qwen3": ("qwen3", _OWN_WIDTH),
    "mistral": ("mistral", {**_OWN_WIDTH, "sliding_window": 5}),
    "gemma2": (
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "num_hidden_layers": 3},
    ),
    "gemma3_text": (
        "gemma3_text",
        {
            **_GEMMA,
            "num_hidden_layers": 4,
            "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING],
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                _SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            },
        },
    ),
    "olmo2": ("olmo2", _COMMON),
}


@cache
def case(name: str) -> Parity:
    model_type, keys = CASES[name]
    return pair(model_type, **keys)


@cache
def step(name: str):
    return their_step(case(name).model, tokens())


@pytest.mark.parametrize("name", CASES)
def test_logits_equal(name):
    it, (want, _) = case(name), step(name)
    got = our_logits(it.spec, it.params, tokens())
    assert np.abs(want).max() > 1
    print(name, "logits", np.abs(got - want).max())
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_one_step_equal(name):
    it, (_, want) = case(name), step(name)
    _, gradients = our_gradients(it.spec, it.params, tokens())
    got = unfilled(it.rules, gradients, gradients=True)
    assert got.keys() == want.keys()
    largest = max(np.abs(gradient).max() for gradient in want.values())
    errors = {}
    for key in want:
        if np.abs(want[key]).max() > 1e-6 * largest:  # a key's bias moves all of a query's scores alike
            errors[key] = error(got[key], want[key])
        else:
            assert np.abs(got[key]).max() < 1e-5 * largest, key
    print(name, "gradients", max(errors.values()))
    assert len(errors) > 0.8 * len(want)
    assert max(errors.values()) < 1e-4, errors


@pytest.mark.parametrize("name", [name for name in CASES if "," not in name and name != "qwen2"])
def test_decoding_with_a_cache_equals_the_whole_text(name):
    it, (want, _) = case(name), step(name)
    np.testing.assert_allclose(decoded(it.spec, it.params, tokens()), want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_configs_and_tensors_round_trip(name):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    it, (want, _) = case(name), step(name)
    written = json.loads(json.dumps(hf.hf_from_spec(it.spec)))
    assert hf.spec_from_hf(written) == it.spec
    config = AutoConfig.for_model(**written)
    assert hf.spec_from_hf(json.loads(json.dumps(config.to_dict()))) == it.spec
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    assert [type(model).__name__] == written["architectures"]
    tensors = {key: torch.tensor(value) for key, value in unfilled(it.rules, it.params).items()}
    assert {key: value.shape for key, value in tensors.items()} == {
        key: value.shape for key, value in model.named_parameters()
    }
    model.load_state_dict(tensors, strict=False)  # what is tied isn't among them
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.tensor(tokens())).logits.numpy(), want, rtol=0, atol=2e-6)
    assert hf.unread_tensors(model.state_dict().keys(), it.rules, hf.family_of(written), it.spec) == []


FAULTS = {
    "gpt2": {"norm_eps": 0.1},
    "llama, tied, llama3": {"rope_low_frequency": 0.5, "rope_high_frequency": 2.0},
    "llama, linear, biases": {"rope_factor": 1.0},
    "llama, yarn": {"rope_original_length": 64},
    "llama, yarn with mscale": {"rope_mscale": 0.5},
    "qwen2, sliding": {"window": 6},
    "mistral": {"window": 4},
    "gemma2": {"global_every": 3},
    "gemma3_text": {"local_rope_theta": 0.0},
    "olmo2": {"norm_eps": 0.1},
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_choice_matters(name):
    it, (want, _) = case(name), step(name)
    spec = it.spec.model_copy(update=FAULTS[name])
    assert np.abs(our_logits(spec, it.params, tokens(), scan_layers=True) - want).max() > 1e-3


@pytest.mark.parametrize("change", ["attention_softcap", "final_softcap", "attention_scale", "embedding_scale"])
def test_each_number_of_gemma_matters(change):
    it, (want, _) = case("gemma2"), step("gemma2")
    spec = it.spec.model_copy(update={change: getattr(it.spec, change) * 1.5})
    assert np.abs(our_logits(spec, it.params, tokens(), scan_layers=True) - want).max() > 1e-3


def test_rows_permuted_wrongly_are_found():
    it, (want, _) = case("llama"), step("llama")

    def interleaved(kernel):
        """As of a checkpoint whose rotary pairs lie side by side."""
        layers, width, columns = kernel.shape
        pairs = kernel.reshape(layers, width, columns // it.spec.head_width, 2, it.spec.head_width // 2)
        return pairs.swapaxes(3, 4).reshape(kernel.shape)

    attention = it.params["blocks"]["attention"]
    wrong = {name: {"kernel": interleaved(attention[name]["kernel"])} for name in ("query", "key")}
    params = it.params | {"blocks": it.params["blocks"] | {"attention": attention | wrong}}
    assert np.abs(our_logits(it.spec, params, tokens()) - want).max() > 1e-2
