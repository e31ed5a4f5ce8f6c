"""How what a run compiles is compiled."""

import jax
import numpy as np
from helpers import run_values

from meshwright.config import make_run
from meshwright.engines.jax.program import Program
from meshwright.models.decoder import Decoder


def test_what_runs_once_is_compiled_at_a_lower_level_to_the_same_numbers(monkeypatch):
    run = make_run(run_values("none", model={"vocab_size": 61}))
    program = Program(run, run.model.spec, model=Decoder)
    fast, slow, other = (
        jax.tree.leaves(jax.jit(program.state.make, compiler_options={"xla_backend_optimization_level": level})())
        for level in (1, 3, 0)
    )
    monkeypatch.setenv("XLA_FLAGS", "")  # which the tests are run with say the level
    ours = jax.tree.leaves(Program(run, run.model.spec, model=Decoder).make_state())
    assert equal(ours, fast) and not equal(ours, other)  # the level is the one it says
    for a, b in zip(ours, slow, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


def equal(ours, theirs) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
