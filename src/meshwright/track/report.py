"""`report.html`: a run on one page that opens from disk, without a network and without this package."""

import json
import math
import os
import re
import tomllib
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from meshwright.errors import UserError
from meshwright.track.charts import SMOOTH_FROM, Series, chart, smooth
from meshwright.track.metrics import PER_SOURCE, as_table, read_lines, read_metrics
from meshwright.track.page import PAGE
from meshwright.track.text import clock, short, visible

Columns = dict[str, tuple[np.ndarray, np.ndarray]]
"""By key, the steps of the records that hold it, and its values there."""

_OPEN_SAMPLES = 3
_MOST_SAMPLES = 30
_SMALL_CHARTS = {
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second",
    "mfu": "Model FLOPs utilization",
}
_EVALUATION = {"val_loss": "Validation loss", "val_bits_per_byte": "Bits per byte", "val_perplexity": "Perplexity"}
_NOT_CHARTS = {"step", "loss", "tokens", "step_seconds", "epochs", *_EVALUATION}


def write_report(run_dir: str | Path) -> Path:
    """Write the report of a run, finished or not.

    The page depends on the run directory alone: the same files give the same bytes.

    Arguments:
        run_dir: a run directory; `run.toml` and `metrics.jsonl` must be there.

    Returns:
        The path of `report.html` in the run directory.

    Raises:
        UserError: there is no such run directory, or a file of it is missing, empty or broken.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory; give the folder that `meshwright train` wrote")
    run_text, run = _read_run(run_dir / "run.toml")
    metrics = run_dir / "metrics.jsonl"
    columns = _columns([record for record in read_metrics(metrics) if isinstance(record.get("step"), int)])
    if not columns:
        raise UserError(f"{metrics}: holds no records yet; train for a step or more first")
    samples = run_dir / "samples.jsonl"
    page = Template(PAGE).substitute(
        name=escape(str(run.get("name", run_dir.name))),
        facts=_facts(run),
        losses="of pairs (DPO)" if run.get("data", {}).get("packing") == "pairs" else "in nats a token",
        tiles=_tiles(columns, _parameters(run_dir)),
        charts=_charts(columns),
        evaluations=_sources(columns) + _evaluations(columns),
        samples=_samples(read_lines(samples) if samples.exists() else []),
        run_file=_highlight(run_text),
    )
    path = run_dir / "report.html"
    beside = path.with_name("report.html.new")
    beside.write_text(page, encoding="utf-8", newline="\n")
    os.replace(beside, path)
    return path


def _read_run(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the folder that `meshwright train` wrote") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}; put back the file that `meshwright train` wrote") from None


def _parameters(run_dir: Path) -> int | None:
    """The count of parameters in the newest checkpoint's manifest, where there is one that says so."""
    for path in sorted((run_dir / "checkpoints").glob("step_*/manifest.json"), reverse=True):
        try:
            return int(json.loads(path.read_text(encoding="utf-8"))["parameters"])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a running training may be writing it or pruning it just now
    return None


def _facts(run: dict[str, Any]) -> str:
    model, train = run.get("model", {}), run.get("train", {})
    data = run.get("data", {}).get("train")
    if isinstance(data, list):
        data = f"{len(data)} sources"
    facts = [run.get("engine"), model.get("preset"), data]
    if {"batch_size", "sequence_length"} <= train.keys():
        facts.append(f"batch {train['batch_size']} \N{MULTIPLICATION SIGN} {train['sequence_length']} tokens")
    facts.append(f"seed {run['seed']}" if "seed" in run else None)
    return "".join(f"<li>{escape(visible(str(fact)))}</li>" for fact in facts if fact)


def _columns(records: list[dict[str, Any]]) -> Columns:
    # A table can't tell a loss that is NaN from a record without a loss, hence the steps of each key.
    table = as_table(records)
    columns = {}
    for key, values in table.items():
        rows = [row for row, record in enumerate(records) if key in record]
        columns[key] = (table["step"][rows], values[rows])
    return columns


def _tiles(columns: Columns, parameters: int | None) -> str:
    tiles = _validation_tiles(columns)
    if "loss" in columns:
        steps, losses = columns["loss"]
        tiles.append(("Training loss", _fixed(losses[-1]), f"at step {steps[-1]:,.0f}"))
    if "tokens" in columns:
        steps, tokens = columns["tokens"]
        epochs = f", {short(columns['epochs'][1][-1])} epochs" if "epochs" in columns else ""
        tiles.append(("Tokens trained", short(tokens[-1]), f"in {steps[-1]:,.0f} steps{epochs}"))
    if "step_seconds" in columns:
        steps, seconds = columns["step_seconds"]
        whole = float(np.nansum(np.diff(steps, prepend=0.0) * seconds))
        tiles.append(("Training time", clock(whole), "without evaluations and saves"))
    if "tokens_per_second" in columns:
        speed = columns["tokens_per_second"][1]
        tiles.append(("Tokens per second", short(float(np.median(speed))), f"median; best {short(float(speed.max()))}"))
    if parameters is not None:
        tiles.append(("Parameters", short(parameters), f"{parameters:,}"))
    return "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )


def _validation_tiles(columns: Columns) -> list[tuple[str, str, str]]:
    if "val_loss" not in columns:
        return []
    steps, losses = columns["val_loss"]
    best = int(np.where(np.isfinite(losses), losses, np.inf).argmin())
    where = f"best, at step {steps[best]:,.0f}; last {_fixed(losses[-1])}"
    if best == len(losses) - 1:
        where = f"best and last, at step {steps[best]:,.0f}"
    tiles = [("Validation loss", _fixed(losses[best]), where)]
    for key, name in list(_EVALUATION.items())[1:]:
        if key in columns:
            tiles.append((name, _at(columns[key], steps[best]), "of validation, same step"))
    return tiles


def _charts(columns: Columns) -> str:
    last_x = max(max(float(steps[-1]) for steps, _ in columns.values()), 1.0)
    losses = []
    if "loss" in columns:
        x, y = columns["loss"]
        if len(y) < SMOOTH_FROM:
            losses = [Series("training", x, y)]
        else:
            losses = [Series("training", x, y, "faint"), Series("training, smoothed", x, smooth(y))]
    if "val_loss" in columns:
        losses.append(Series("validation", *columns["val_loss"], "dots", "validation"))
    charts = [chart("Loss", losses, last_x=last_x, wide=True)] if losses else []
    own = {
        key: key
        for key in columns
        if key not in _NOT_CHARTS and key not in _SMALL_CHARTS and not key.startswith(PER_SOURCE)
    }
    for key, title in {**_SMALL_CHARTS, **own}.items():
        if key in columns:
            charts.append(chart(title, [Series(title, *columns[key])], last_x=last_x))
    return "".join(charts)


def _sources(columns: Columns) -> str:
    names = [key.removeprefix("epochs/") for key in columns if key.startswith("epochs/")]
    if not names:
        return ""
    tokens, epochs = ([columns[f"{kind}/{name}"][1][-1] for name in names] for kind in ("tokens", "epochs"))
    rows = [
        [escape(name), short(many), f"{many / max(sum(tokens), 1):.1%}", short(often)]
        for name, many, often in zip(names, tokens, epochs, strict=True)
    ]
    table = _table(["Source", "Tokens", "Share", "Epochs"], rows)
    return f"<section><h2>Sources</h2>{table}</section>"


def _evaluations(columns: Columns) -> str:
    if "val_loss" not in columns:
        return ""
    keys = [key for key in _EVALUATION if key in columns]
    steps = columns["val_loss"][0][::-1]
    rows = [[f"{step:,.0f}", *(_at(columns[key], step) for key in keys)] for step in steps]
    table = _table(["Step", *(_EVALUATION[key] for key in keys)], rows)
    return f"<details><summary>All evaluations</summary>{table}</details>"


def _table(head: list[str], rows: list[list[str]]) -> str:
    names = "".join(f'<th scope="col">{name}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>"


def _at(column: tuple[np.ndarray, np.ndarray], step: float) -> str:
    """The value at a step; a dash where the record of that step has none."""
    values = column[1][column[0] == step]
    return _fixed(values[-1]) if values.size else "\N{EN DASH}"


def _fixed(value: float) -> str:
    return f"{value:,.4f}" if math.isfinite(value) else "not finite"


def _samples(samples: list[dict[str, Any]]) -> str:
    if not samples:
        return ""
    newest = samples[::-1]
    blocks = [_sample(one) for one in newest[:_MOST_SAMPLES]]
    earlier = "".join(blocks[_OPEN_SAMPLES:])
    if len(newest) > _MOST_SAMPLES:
        earlier += f'<p class="note">{len(newest) - _MOST_SAMPLES:,} more in samples.jsonl</p>'
    folded = f"<details><summary>Earlier samples</summary>{earlier}</details>" if earlier else ""
    return f"<section><h2>Samples</h2>{''.join(blocks[:_OPEN_SAMPLES])}{folded}</section>"


def _sample(one: dict[str, Any]) -> str:
    prompt, text = escape(visible(one["prompt"])), escape(visible(one["text"]))
    return f'<article class="sample"><h3>Step {one["step"]:,}</h3><pre><b>{prompt}</b>{text}</pre></article>'


def _highlight(toml: str) -> str:
    """Section heads and keys marked, line by line; the text itself stays as it is."""
    lines = []
    for line in visible(toml).rstrip().split("\n"):
        key = re.match(r"[\w.-]+(?= = )", line)
        if line.startswith("["):
            lines.append(f"<b>{escape(line)}</b>")
        elif key:
            lines.append(f"<i>{escape(key[0])}</i>{escape(line[key.end() :])}")
        else:
            lines.append(escape(line))
    return "\n".join(lines)
