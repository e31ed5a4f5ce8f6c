"""What a second start of a run compiles: with the cache of compiled programs empty, and as the first start left it.

    python benchmarks/second_start.py            writes results/second_start.json
    python benchmarks/second_start.py --cases …  takes some of all, with ';' between

The runs are those of `gpu_train.py`. Each start is a process of its own that makes the engine and takes two steps.
Times are JAX's own of each program, added up: to trace and lower it, and to compile it or, where it is in the cache, to
read it. Parameters are made by a program, too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
from common import card, machine, write_results
from gpu_train import CASES, our_run

NAMES = ["gpt2-124m", "llama-1b"]
TRACED = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration")
COMPILED = "backend_compile_duration"


def work(name: str, cache: str) -> dict[str, Any]:
    """A start: what its programs took."""
    import jax

    from meshwright.data.examples import Batch
    from meshwright.engines.jax.engine import JaxEngine

    seconds: dict[str, float] = {}
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, took, **_: seconds.update({event: seconds.get(event, 0.0) + took})
    )
    read: list[str] = []
    jax.monitoring.register_event_listener(lambda event, **_: read.append(event))
    run, case = our_run(CASES[name]), CASES[name]
    run = run.model_copy(update={"train": run.train.model_copy(update={"compile_cache": cache})})
    started = time.perf_counter()
    engine = JaxEngine(run, run.model.spec)
    ids = np.random.default_rng(0).integers(0, case["vocab"], (case["batch"], case["time"] + 1), dtype=np.int32)
    batch = Batch(ids[:, :-1].copy(), ids[:, 1:].copy(), np.ones((case["batch"], case["time"]), np.float32))
    losses = [float(engine.train_step(batch)["loss"]) for _ in range(2)]
    total = {event.rpartition("/")[2]: took for event, took in seconds.items()}
    return {
        "to_second_loss_s": time.perf_counter() - started,
        "trace_s": sum(total.get(event, 0.0) for event in TRACED),
        "compile_s": total.get(COMPILED, 0.0),
        "programs_read": read.count("/jax/compilation_cache/cache_hits"),
        "programs_compiled": read.count("/jax/compilation_cache/cache_misses"),
        "losses": losses,
    }


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default=";".join(NAMES), help="some of them, with ';' between")
    parser.add_argument("--cache", help="(the script calls itself with this)")
    arguments = parser.parse_args()
    names = arguments.cases.split(";")
    if arguments.cache:
        print(json.dumps(work(names[0], arguments.cache)))
        return
    measured_on, results = {**machine("jax", "flax", "optax"), "card": card()}, {}
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, __file__, "--cases", name, "--cache", cache]
            starts = [json.loads(subprocess.check_output(command, text=True).splitlines()[-1]) for _ in range(2)]
        results[name] = dict(zip(("first", "second"), starts, strict=True))
        print(name, json.dumps(results[name], indent=1), flush=True)
        write_results("second_start", measured_on, {"cases": results})


if __name__ == "__main__":
    main()
