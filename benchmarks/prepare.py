"""How fast `prepare` is beside its tokenizer alone, and how much memory it takes.

    python benchmarks/prepare.py

Per size, in turn and three times over, each in a process of its own: the tokenizer's `encode_batch_fast` over
documents that lie in memory, and `prepare` over the same documents as files, to a whole store on disk. The tokenizer
is a `bpe` of 4,096 tokens trained on the standard library beforehand. Last, `prepare` of `python-stdlib` from nothing,
training the tokenizer too. `ratio` is by the clock, `cpu_ratio` by processor time, which other work on the machine
disturbs less. Medians go to `benchmarks/results/prepare.json`, with what they were measured on.
"""

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from meshwright.config import Run, make_run
from meshwright.data.encode import BATCH_CHARACTERS
from meshwright.data.prepare import prepare
from meshwright.data.sources import open_source
from meshwright.data.tokenizer import train_bpe

RESULTS = Path(__file__).parent / "results" / "prepare.json"
SIZES_MB = (10, 200)
REPEATS = 3


def write_corpus(folder: Path, size: int) -> None:
    """The standard library's files up to `size` bytes, over and over, each with a header line of its own."""
    folder.mkdir(parents=True)
    texts = [document.text for document in open_source("python-stdlib").documents() if document.text]
    number = written = 0
    while written < size:
        text = f"# copy {number // len(texts)}, file {number % len(texts)}\n{texts[number % len(texts)]}"
        written += (folder / f"{number:06}.py").write_bytes(text.encode())
        number += 1


def a_run(train: str, tokenizer: dict, store: str) -> Run:
    """A run whose data are these."""
    data = {"train": train, "store": store}
    return make_run({"name": "prepare", "data": data, "tokenizer": tokenizer, "model": {"preset": "gpt2"}})


def measure_raw(corpus: str, tokenizer: str) -> dict:
    """The tokenizer alone: documents in memory, batches as `prepare` makes them, ids left where they are."""
    from tokenizers import Tokenizer

    batches: list[list[str]] = [[]]
    size = 0
    for document in open_source(corpus).documents():
        batches[-1].append(document.text)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            batches.append([])
            size = 0
    encoder = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    encoder.encode_special_tokens = True
    seconds, cpu_seconds, tokens = 0.0, 0.0, 0
    for batch in batches:
        start, cpu_start = time.perf_counter(), time.process_time()
        encoded = encoder.encode_batch_fast(batch, add_special_tokens=False)
        seconds += time.perf_counter() - start
        cpu_seconds += time.process_time() - cpu_start
        tokens += sum(map(len, encoded))
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens}


def measure_prepare(corpus: str, tokenizer: str) -> dict:
    """`prepare`, from files to a whole store; with no tokenizer given, one is trained."""
    section = {"kind": f"hf:{tokenizer}"} if tokenizer else {"kind": "bpe", "vocab_size": 4096}
    with tempfile.TemporaryDirectory() as folder:
        start, cpu_start = time.perf_counter(), time.process_time()
        store = prepare(a_run(corpus, section, f"{folder}/store"))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        splits = [store.split(name) for name in ("train", "validation")]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": sum(split.token_count - split.document_count for split in splits),
        "bytes": sum(split.byte_count or 0 for split in splits),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def in_a_process(what: str, corpus: str, tokenizer: str = "") -> dict:
    """One measurement, alone in a process so that its peak memory is its own."""
    command = [sys.executable, __file__, what, corpus, tokenizer]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def median(runs: list[dict]) -> dict:
    """The median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def machine() -> dict:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    packages = ("numpy", "tokenizers")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
    }


def main() -> None:
    """Measure, write the results, print them."""
    sizes = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = f"{folder}/tokenizer"
        train_bpe((d.text for d in open_source("python-stdlib").documents()), 4096).save(Path(tokenizer))
        for size in SIZES_MB:
            corpus = f"{folder}/{size}"
            write_corpus(Path(corpus), size * 10**6)
            raw, whole = [], []
            for _ in range(REPEATS):
                raw.append(in_a_process("raw", corpus, tokenizer))
                whole.append(in_a_process("prepare", corpus, tokenizer))
            one, other = median(raw), median(whole)
            assert one["tokens"] == other["tokens"], "the two measured different work"
            sizes.append(
                {
                    "megabytes": other["bytes"] / 1e6,
                    "tokens": other["tokens"],
                    "tokenizer_tokens_per_second": one["tokens"] / one["seconds"],
                    "prepare_tokens_per_second": other["tokens"] / other["seconds"],
                    "ratio": one["seconds"] / other["seconds"],
                    "cpu_ratio": one["cpu_seconds"] / other["cpu_seconds"],
                    "prepare_peak_mb": other["peak_mb"],
                }
            )
        stdlib = median([in_a_process("prepare", "python-stdlib") for _ in range(REPEATS)])
    results = {
        "command": "python benchmarks/prepare.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine(),
        "repeats": REPEATS,
        "load_before": load,
        "encode": sizes,
        "stdlib_from_nothing": stdlib,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{'text':>8} {'tokenizer alone':>18} {'prepare':>18} {'ratio':>6} {'by CPU':>6} {'peak memory':>12}")
    for row in sizes:
        alone, whole_way = row["tokenizer_tokens_per_second"], row["prepare_tokens_per_second"]
        print(
            f"{row['megabytes']:5.0f} MB {alone:10,.0f} tokens/s {whole_way:9,.0f} tokens/s "
            f"{row['ratio']:6.2f} {row['cpu_ratio']:6.2f} {row['prepare_peak_mb']:9,.0f} MB"
        )
    print(f"python-stdlib from nothing: {stdlib['seconds']:.1f} s, {stdlib['peak_mb']:,.0f} MB")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        measure = {"raw": measure_raw, "prepare": measure_prepare}[sys.argv[1]]
        print(json.dumps(measure(*sys.argv[2:])))
