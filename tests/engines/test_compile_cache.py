"""The second start of a run reads what the first has compiled; each start is a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

START = """
import json, sys
import jax
found = {"hits": 0, "misses": 0, "seconds": 0.0}

def count(event, **_):
    for name in ("hits", "misses"):
        found[name] += event == f"/jax/compilation_cache/cache_{name}"

def add(event, seconds, **_):
    found["seconds"] += seconds * (event == "/jax/core/compile/backend_compile_duration")  # or of reading the cache

jax.monitoring.register_event_listener(count)
jax.monitoring.register_event_duration_secs_listener(add)
from meshwright.config import make_run
from meshwright.engines.jax.engine import JaxEngine
values = json.loads(sys.argv[1])
run = make_run(values)
JaxEngine(run, run.model.spec)
print(json.dumps(found))
"""


def start(cache: str, environment: dict[str, str] | None = None, layers: int = 2) -> dict[str, float]:
    model = {"preset": "gpt2-tiny", "layers": layers, "vocab_size": 300, "context_length": 64}
    train = {"batch_size": 2, "sequence_length": 32, "compile_cache": cache}
    values = json.dumps({"data": {"train": "none"}, "model": model, "train": train})
    command = [sys.executable, "-c", START, values]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_second_start_reads_what_the_first_compiled(tmp_path):
    cache = str(tmp_path / "cache")
    first, second, other = start(cache), start(cache), start(cache, layers=3)
    assert first["misses"] > 0 and first["hits"] == 0
    assert second["hits"] == first["misses"] and second["misses"] == 0
    assert 0 < second["seconds"] < first["seconds"]
    assert other["misses"] > 0  # another program is another entry


def test_where_it_lies(tmp_path):
    theirs = tmp_path / "theirs"
    environment = {"XDG_CACHE_HOME": str(tmp_path / "home"), "JAX_COMPILATION_CACHE_DIR": str(theirs)}
    start(str(tmp_path / "ours"), environment)
    assert theirs.is_dir() and not (tmp_path / "ours").exists()  # JAX's own variable comes first
    for choice in ("off", "auto"):  # auto: not on a CPU
        start(choice, {"XDG_CACHE_HOME": str(tmp_path / "home")})
        assert not Path(tmp_path / "home").exists()
