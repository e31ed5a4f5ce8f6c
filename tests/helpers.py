"""What several tests share: a tiny corpus, a tiny run file, and the command line as a real process."""

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

WORDS = "the quick brown fox jumps over a lazy dog while rain falls on old stone walls near quiet rivers".split()
# Most of the time of a test goes into compiling tiny programs, which run as fast without its dearest parts.
QUICK = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):  # XLA ends a process over a flag that it doesn't know
    QUICK += " --xla_cpu_use_fusion_emitters=false"
MAIN = [sys.executable, "-c", "from meshwright.cli import main; main(prog_name='meshwright')"]


def virtual_devices(number: int) -> dict[str, str]:
    """What the environment of a process must say for it to have so many virtual devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={number}"
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def write_corpus(folder: Path, documents: int = 60, seed: int = 0) -> Path:
    """A folder of small text files with a little structure to learn."""
    folder.mkdir(parents=True, exist_ok=True)
    choose = random.Random(seed)
    for number in range(documents):
        words = [choose.choice(WORDS) for _ in range(choose.randint(40, 120))]
        (folder / f"{number:03}.txt").write_text(f"{number}. {' '.join(words)}.\n", encoding="utf-8")
    return folder


def run_values(corpus: Path | str, **sections: dict) -> dict:
    """A run small enough to train in a second; sections given are laid over it."""
    values: dict = {
        "name": "tiny",
        "data": {"train": str(corpus), "validation": 0.2},
        "tokenizer": {"kind": "bytes"},
        "model": {
            "preset": "gpt2-tiny",
            "layers": 2,
            "width": 32,
            "heads": 2,
            "ffn_width": 64,
            "context_length": 64,
        },
        "optimizer": {"learning_rate": 3e-3},
        "train": {
            "steps": 12,
            "batch_size": 4,
            "sequence_length": 32,
            "log_every": 1,
            "eval_every": 0,
            "sample_every": 0,
        },
        "checkpoint": {"every": 4},
    }
    for name, section in sections.items():
        if isinstance(section, dict):
            values[name] = {**values.get(name, {}), **section}
        else:
            values[name] = section
    return values


def write_run(path: Path, values: dict) -> Path:
    """Write a run file."""
    import tomli_w

    path.write_text(tomli_w.dumps(values), encoding="utf-8")
    return path


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """A server of the S3 protocol; what the environment must say for it to be used."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "anything")
    try:
        yield {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_DEFAULT_REGION": "us-east-1", **keys}
    finally:
        server.stop()


def meshwright(*arguments: object, cwd: Path, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """Run a command to its end."""
    return subprocess.run(
        [*MAIN, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def start_meshwright(*arguments: object, cwd: Path) -> subprocess.Popen:
    """Start a command in a process group of its own; end it with `kill`."""
    return subprocess.Popen(
        [*MAIN, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen) -> None:
    """SIGKILL the process and what it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def wait_for(condition, process: subprocess.Popen, timeout: float = 180) -> None:
    """Poll until a condition holds while a process runs."""
    end = time.monotonic() + timeout
    while not condition():
        if process.poll() is not None:
            raise AssertionError(f"the process ended early:\n{process.communicate()}")
        if time.monotonic() > end:
            raise AssertionError("timed out")
        time.sleep(0.005)
