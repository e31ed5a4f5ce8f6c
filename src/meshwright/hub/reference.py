"""What the library `transformers` makes of an exported checkpoint, where it is installed."""

import importlib.metadata
import importlib.util
from pathlib import Path

import numpy as np

from meshwright.errors import UserError


def transformers_version() -> str:
    """Of the library, if it and PyTorch are installed; else empty."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return ""
    return importlib.metadata.version("transformers")


def transformers_logits(folder: Path, tokens_BT: np.ndarray) -> np.ndarray:
    """The scores that `AutoModelForCausalLM` gives, on the CPU.

    Arguments:
        folder: of the checkpoint.
        tokens_BT: token ids.

    Returns:
        `[B, T, V]`, float32.

    Raises:
        UserError: it doesn't open the checkpoint, or not all of its tensors.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        model, about = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
    except Exception as error:
        raise UserError(f"transformers can't open it: {type(error).__name__}: {error}") from None
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about.get(what):
            raise UserError(f"transformers opens it with {what.replace('_', ' ')}: {sorted(map(str, about[what]))[:5]}")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens_BT.astype(np.int64)), use_cache=False).logits.numpy()
