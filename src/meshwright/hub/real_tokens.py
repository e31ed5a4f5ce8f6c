"""Real token ids of a run, on which its model and what was exported are compared."""

import numpy as np

from meshwright.config import Run
from meshwright.data.make import Recipe
from meshwright.data.recipes import plan_stores
from meshwright.data.store import Store
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import UserError
from meshwright.hub.tokenizer_files import HARD_TEXTS

ROWS, LENGTH = 2, 128
_LONGEST_WINDOW = 1024


def real_tokens(run: Run, tokenizer: Tokenizer) -> np.ndarray:
    """Token ids `[B, T]`: of the run's validation text where its store is there, else of the sample prompt and such.

    Arguments:
        run: the run.
        tokenizer: the one it was trained with.
    """
    spec = run.model.spec
    length = LENGTH if spec.window > _LONGEST_WINDOW else max(LENGTH, spec.window + LENGTH // 2)
    length = min(length, spec.context_length)  # beyond a window, where there is one
    ids = _validation(run, tokenizer, ROWS * length)
    if ids is None:
        text = tokenizer.encode("\n".join((run.train.sample_prompt, *HARD_TEXTS)))
        ids = np.resize(np.array(text), ROWS * length)
    return ids.reshape(ROWS, length).astype(np.int32)


def _validation(run: Run, tokenizer: Tokenizer, count: int) -> np.ndarray | None:
    if run.data.stream:
        return None
    try:
        found = [_store(item) for item in plan_stores(run, None).items]
    except UserError:
        return None  # the text isn't here any more
    stores = [one for one in found if one and one.manifest["tokenizer"]["fingerprint"] == tokenizer.fingerprint]
    splits = [store.split(name) for name in ("validation", "train") for store in stores]
    split = next((split for split in splits if split.token_count >= count), None)
    return None if split is None else split.read(0, count)


def _store(item: Recipe | Store) -> Store | None:
    if isinstance(item, Store):
        return item
    return Store.open(item.path) if (item.path / "manifest.json").is_file() else None
