"""What the libraries `transformers` and `peft` make of what was exported, where they are installed."""

import importlib.metadata
import importlib.util
import warnings
from pathlib import Path
from typing import Any

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
        opened: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, local_files_only=True
        )
        model, about = opened
    except Exception as error:
        raise UserError(f"transformers can't open it: {type(error).__name__}: {error}") from None
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if about.get(what):
            raise UserError(f"transformers opens it with {what.replace('_', ' ')}: {sorted(map(str, about[what]))[:5]}")
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens_BT.astype(np.int64)), use_cache=False).logits.numpy()


def peft_version() -> str:
    """Of the library, if it, `transformers` and PyTorch are installed; else empty."""
    if not transformers_version() or not importlib.util.find_spec("peft"):
        return ""
    return importlib.metadata.version("peft")


def peft_logits(base: Path, folder: Path, tokens_BT: np.ndarray) -> np.ndarray:
    """The scores of a checkpoint with adapters, on the CPU.

    Arguments:
        base: folder of the checkpoint.
        folder: of the adapters.
        tokens_BT: token ids.

    Returns:
        `[B, T, V]`, float32.

    Raises:
        UserError: `peft` doesn't open them, or not all of their tensors.
    """
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    more = {"dtype": torch.float32, "attn_implementation": "eager", "local_files_only": True}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*adapter keys.*")  # what is missing is but a warning there
            model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **more), str(folder))
    except Exception as error:
        raise UserError(f"peft can't open it: {type(error).__name__}: {error}") from None
    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens_BT.astype(np.int64)), use_cache=False).logits.numpy()
