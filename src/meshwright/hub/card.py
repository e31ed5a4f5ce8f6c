"""The model card of an export: what the model was made of, and what is left for its maker to say."""

import json
from typing import Any

from meshwright.config import Run

_TEXT = """\
---
library_name: {library}
{about_base}pipeline_tag: text-generation
tags:
- meshwright
---

# {name}

{summary}

| | |
| --- | --- |
{rows}

## Licence

To be stated by you: that of the data it was trained on, {base}and that under which you give it away. Name it here and
as `license:` at the top of this file.

## Data and intended use

To be stated by you: what the text is, where it came from, and what the model is for.

## Proof

{proof}

## The run file

Every key with its value, as the run was trained:

```toml
{run_file}```
"""


def model_card(
    run: Run,
    *,
    parameters: int,
    active_parameters: int,
    dtype: str,
    manifest: dict[str, Any],
    losses: dict[str, float],
    proof: list[str],
    adapters: dict[str, str],
    adapters_of: str = "",
) -> str:
    """The text of `README.md`.

    Arguments:
        run: as resolved.
        parameters, active_parameters: of the model; of those, used for one token.
        dtype: that the tensors are written in.
        manifest: of the checkpoint that was exported.
        losses: the last ones known at its step: `loss`, `val_loss`, `val_bits_per_byte`.
        proof: what was compared, in lines.
        adapters: rows on what was trained, where that was adapters alone.
        adapters_of: the checkpoint that they belong to, where they are written alone; else empty.
    """
    identity, started = manifest.get("identity", {}), run.model.init
    sources = ", ".join(f"`{one.source}`" for one in run.data.sources)
    active = f", {active_parameters:,} of them for each token" if active_parameters < parameters else ""
    start = "" if started == "random" else f", from the parameters of `{started}`"
    unit = "DPO, a pair" if run.data.packing == "pairs" else "nats a token"
    rows = {
        "parameters": f"{parameters:,}{active}, in {dtype}",
        "architecture": f"{_kind(run)}: {run.model.layers} layers of width {run.model.width}, "
        f"context of {run.model.context_length:,} tokens, vocabulary of {run.model.vocab_size:,}",
        "trained for": f"{manifest['step']:,} steps, {manifest.get('tokens', 0):,} tokens{start}",
        **adapters,
        **{_LOSSES[key].format(unit=unit): f"{losses[key]:.4f}" for key in _LOSSES if losses.get(key) is not None},
        "data": f"{sources}; fingerprint `{identity.get('data (fingerprint)', 'unknown')}`",
        "tokenizer": f"`{run.tokenizer.kind}`; fingerprint `{identity.get('tokenizer (fingerprint)', 'unknown')}`",
    }
    return _TEXT.format(
        name=run.name,
        library="peft" if adapters_of else "transformers",
        about_base=f"base_model: {adapters_of}\n" if adapters_of else "",
        summary=f"Adapters of `{adapters_of}`, trained with Meshwright."
        if adapters_of
        else f"A language model of {parameters:,} parameters, trained with Meshwright.",
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        base="that of the model it started from, " if started != "random" else "",
        proof="\n".join(f"- {line}" for line in proof),
        run_file=run.to_toml(),
    )


def _kind(run: Run) -> str:
    return json.loads(run.model.config)["model_type"] if run.model.config else run.model.family


_LOSSES = {
    "loss": "training loss ({unit})",
    "val_loss": "validation loss ({unit})",
    "val_bits_per_byte": "validation bits a byte",
}
