"""Decoding on eight virtual devices: the tokens of one device, from a cache that is cut, with nothing compiled twice.

The devices must be there before JAX starts, so this file runs itself as a script, once: it measures, and prints what
the tests then look at.
"""

import json
import sys
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from helpers import run_values
from virtual import measured_on_eight_devices

from meshwright.config import make_run
from meshwright.engines.base import Sampling
from meshwright.engines.jax.engine import JaxEngine
from meshwright.models.decoder import Decoder

SIZES = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "vocab_size": 61, "dropout": 0.0}
LATENT = {"kv_heads": 4, "head_width": 8, "rotary_width": 4, "value_width": 10, "kv_latent": 16, "query_latent": 24}
LLAMA = {"preset": "llama-tiny", **SIZES}
DEEPSEEK = {"preset": "deepseek-tiny", **SIZES, **LATENT, "experts": 4, "dense_layers": 1, "dense_ffn_width": 24}
CASES = {
    "data 2, fsdp 2, tensor 2": (LLAMA, {"data": 2, "fsdp": 2, "tensor": 2}),
    "circular pipeline": ({**LLAMA, "layers": 4}, {"fsdp": 2, "tensor": 2, "pipeline": 2, "pipeline_rounds": 2}),
    "context 2, tensor 4: more shares than heads": (LLAMA, {"context": 2, "tensor": 4}),
    "expert 2, tensor 2, data 2": (DEEPSEEK, {"expert": 2, "tensor": 2, "data": 2}),
}
FIRST = next(iter(CASES))
PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9], [20, 30, 40]]
OTHERS = [[8, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9], [50]]
STOP, COUNT = 60, 24
GREEDY, HOT = Sampling(0.0), Sampling(0.9, top_k=20, seed=3)


class Loud(Decoder):
    """A model whose first parameters are so large that what it says depends on what came before."""

    def __init__(self, spec, **more):
        super().__init__(spec, **more)
        nnx.update(self, jax.tree.map(lambda leaf: 5.0 * leaf, nnx.state(self, nnx.Param)))


def make_engine(model, mesh):
    values = run_values("x", model=model, mesh={"data": 1, **mesh}, train={"batch_size": 8})
    micro = {"batch_size": 8, "micro_batch_size": 4, "sequence_length": 32}
    run = make_run({**values, "train": {**values["train"], **micro}})
    return JaxEngine(run, run.model.spec, model=Loud, training=False)  # without a mesh: on one device of the eight


def generate(engine, prompts, count=COUNT, sampling=GREEDY, stop=STOP):
    return list(engine.generate(prompts, count, stop, sampling))


def bytes_here(tree):
    """What the first device holds, and what there is."""
    leaves = jax.tree.leaves(tree)
    here = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    return here, sum(leaf.nbytes for leaf in leaves)


@cache
def on_one_device(model, sampling=GREEDY):
    """The tokens of one device; `model` is JSON."""
    return generate(make_engine(json.loads(model), {}), PROMPTS, COUNT, sampling)


def measure(case):
    """The tokens of both, and how often something was compiled."""
    model, mesh = CASES[case]
    cut = make_engine(model, mesh)
    compiled, compiled_for = [], {}

    def note(name, *_, **__):
        compiled.extend([name] if name == "/jax/core/compile/backend_compile_duration" else [])

    def counted(of, *arguments):
        compiled.clear()
        tokens = generate(cut, *arguments)
        compiled_for[of] = len(compiled)
        return tokens

    found = {"alone": on_one_device(json.dumps(model)), "compiled_for": compiled_for}
    jax.monitoring.register_event_duration_secs_listener(note)
    found |= {"cut": counted("first", PROMPTS), "again": counted("again", PROMPTS)}
    found["only"] = counted("fewer", PROMPTS[:1])
    if case == FIRST:
        found |= {"alone_hot": on_one_device(json.dumps(model), HOT), "cut_hot": counted("hot", PROMPTS, COUNT, HOT)}
        counted("others", OTHERS, 11, HOT._replace(temperature=1, top_p=0.5, seed=8), 7)
    jax.monitoring.clear_event_listeners()
    generator = cut._generator
    batch = -(-len(PROMPTS) // generator._shares) * generator._shares
    prepared, tokens_BP = generator._prepare(cut._state.params), np.zeros((batch, 64), np.int32)
    ended_B, lengths_B = np.zeros(batch, bool), np.ones(batch, np.int32)
    rows = generator._prefill(prepared, tokens_BP, lengths_B, ended_B, STOP, GREEDY, 64, "likeliest")[1]
    return {**found, "prepared": bytes_here(prepared), "cache": bytes_here(rows.cache_L)}


@pytest.fixture(scope="module")
def measured():
    return measured_on_eight_devices(__file__)


@pytest.mark.parametrize("case", CASES)
def test_the_tokens_are_those_of_one_device(measured, case):
    found = measured[case]
    assert found["cut"] == found["alone"]
    columns = list(zip(*found["cut"], strict=True))
    assert len(set(columns)) == len(PROMPTS)
    assert all(len(set(column)) > 2 for column in columns)


def test_what_is_drawn_is_that_of_one_device(measured):
    assert measured[FIRST]["cut_hot"] == measured[FIRST]["alone_hot"] != measured[FIRST]["cut"]


@pytest.mark.parametrize("case", CASES)
def test_a_row_does_not_depend_on_how_many_there_are(measured, case):
    assert measured[case]["only"] == [row[:1] for row in measured[case]["cut"] if row[0] is not None]


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compiled_twice(measured, case):
    found = measured[case]
    assert found["again"] == found["cut"]
    assert found["compiled_for"]["first"] > 0
    assert found["compiled_for"]["again"] == 0


def test_other_prompts_and_numbers_compile_nothing(measured):
    assert measured[FIRST]["compiled_for"]["hot"] > 0  # another way to choose
    assert measured[FIRST]["compiled_for"]["others"] == 0
    assert measured[FIRST]["compiled_for"]["fewer"] == 0  # each device has one row, whether there is a prompt or not


@pytest.mark.parametrize(
    ("case", "share"),
    [
        ("data 2, fsdp 2, tensor 2", 1 / 8),
        ("circular pipeline", 1 / 4),
        ("context 2, tensor 4: more shares than heads", 1),
        ("expert 2, tensor 2, data 2", 1 / 4),
    ],
)
def test_rows_and_heads_are_cut(measured, case, share):
    here, whole = measured[case]["cache"]
    assert here == share * whole


@pytest.mark.parametrize(
    ("case", "shares"), [("data 2, fsdp 2, tensor 2", 4), ("circular pipeline", 8), ("expert 2, tensor 2, data 2", 2)]
)
def test_no_device_holds_all_parameters(measured, case, shares):
    here, whole = measured[case]["prepared"]
    assert here <= 1.2 * whole / shares  # norms are whole on every device


if __name__ == "__main__":
    sys.stdout.write(json.dumps({case: measure(case) for case in CASES}))
