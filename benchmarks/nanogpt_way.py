"""Text to tokens as nanoGPT's prepare scripts do it: `datasets.map`, then a memory map that is filled shard by shard.

    python benchmarks/nanogpt_way.py CORPUS.jsonl FOLDER

Reads the field `text`, writes `FOLDER/train.bin` (uint16, GPT-2's byte pairs, end of text after each document); the
cache of `datasets` lies in FOLDER too. No share is held out, so that the tokens come in the order of the documents.
"""

import os
import sys
from pathlib import Path

BATCHES = 1024


def main(corpus: str, folder: str) -> None:
    """See above."""
    os.environ["HF_HOME"] = folder
    import numpy as np
    import tiktoken
    from datasets import load_dataset

    encoding = tiktoken.get_encoding("gpt2")

    def encode(document: dict) -> dict:
        ids = [*encoding.encode_ordinary(document["text"]), encoding.eot_token]
        return {"ids": ids, "len": len(ids)}

    cores = os.cpu_count() or 1
    texts = load_dataset("json", data_files=corpus, split="train", num_proc=cores)
    tokens = texts.map(encode, remove_columns=texts.column_names, num_proc=cores)
    total = int(np.sum(tokens["len"], dtype=np.int64))
    out = np.memmap(Path(folder) / "train.bin", np.uint16, "w+", shape=(total,))
    batches = min(BATCHES, len(tokens))
    start = 0
    for number in range(batches):
        batch = tokens.shard(batches, number, contiguous=True).with_format("numpy")
        ids = np.concatenate(batch["ids"])
        out[start : start + len(ids)] = ids
        start += len(ids)
    out.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
