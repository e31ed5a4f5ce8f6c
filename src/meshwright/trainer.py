"""The loop: when to log, evaluate, sample, save and stop. The same for every engine."""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from meshwright.checkpoints import Checkpoint, Checkpoints
from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.documents import Source
from meshwright.data.feed import Batches, Feed
from meshwright.data.loader import TrainData, eval_batches
from meshwright.data.prepare import prepare
from meshwright.data.tokenizer import Tokenizer
from meshwright.engines.base import Engine, Sampling
from meshwright.errors import UserError
from meshwright.hub.generation import keep_generation
from meshwright.launch.group import ALONE, Group
from meshwright.models.spec import ModelSpec
from meshwright.profiling import Profile
from meshwright.recorder import Recorder
from meshwright.resuming import batch_sizes_of, check_steps, identity_of, resume, with_start
from meshwright.rundir import RunDirectory
from meshwright.signals import Stop, stop_signals
from meshwright.storage.mirror import mirror_of
from meshwright.track.console import Console, Summary
from meshwright.track.report import write_report
from meshwright.track.trackers import Trackers

EngineMaker = Callable[[Run, ModelSpec], Engine]

SAMPLE_TOKENS = 160
_NAMED_SOURCES = 4
_PREPARE_SECONDS = 7 * 24 * 3600.0
_NO_BEGINNING = (
    "the checkpoint's tokenizer begins each text with a beginning of text, and here none is added; set "
    "tokenizer.add_bos = true if the model was trained with one"
)


@dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    run_dir: Path | str
    """A folder, or an address on an object store; `open_run` takes either."""
    step: int
    """Updates done, those before a resume included."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """The last evaluation of this call: `step`, and what `evaluate` gives."""
    stopped_by: int | None = None
    """The signal that ended training early; None: all steps are done."""


def train(
    run: Run,
    make_engine: EngineMaker,
    console: Console,
    source: Source | None = None,
    group: Group = ALONE,
    feed: Feed | None = None,
    stop: Stop | None = None,
    on_committed: Callable[[Checkpoint], None] | None = None,
) -> Outcome:
    """Train as a run file says; go on from the newest sound checkpoint where there is one.

    Arguments:
        run: a checked run file.
        make_engine: builds the engine for a run and its architecture.
        console: where progress is shown.
        source: documents from Python in place of `data.train`.
        group: the processes that train together, each calling this. One of them speaks and writes for all.
        feed: makes the examples on the way, in place of stores that are prepared.
        stop: asks for an end; None: this process's signals do.
        on_committed: told of each new checkpoint when it is whole, in every process, after the same step.

    Raises:
        UserError: the data, the run directory or a checkpoint doesn't fit the run, or the loss stopped being finite.
    """
    with ExitStack() as closing:
        started = time.monotonic()
        directory = RunDirectory(run.directory)
        if group.is_primary:
            closing.enter_context(directory.locked())
        if mirror := mirror_of(run.run_dir, group, console.note):
            closing.enter_context(mirror)
        trackers = closing.enter_context(Trackers(run, directory if group.is_primary else None, console))
        if feed:
            corpus = feed.corpus(console.prepare_progress, console.note)
        else:
            corpus = prepare_once(run, source, console, group)
        tokenizer, spec = corpus.tokenizer(), resolve_spec(run, corpus, is_stored=feed is None)
        eval_every, prompt = run.train.eval_every if evaluates(run, corpus) else 0, sample_prompt(run, tokenizer)
        checkpoints = Checkpoints(
            directory.checkpoints,
            run.checkpoint.keep,
            commits=group.is_primary,
            on_committed=on_committed,
            on_failed=trackers.note if group.size == 1 else None,
            note=trackers.note,
            reader=mirror,
        )
        if group.size == 1:  # else a process that is gone would be waited for
            closing.enter_context(checkpoints)
        checkpoints.sweep()
        check_steps(run, checkpoints)
        started_as = with_start(run, corpus, checkpoints, trackers.note, group)
        engine = make_engine(started_as, spec)
        identity = partial(identity_of, run, spec, corpus, engine)
        resumed = resume(engine, checkpoints, identity, trackers.note, group)
        start, tokens = (resumed.step, resumed.manifest["tokens"]) if resumed else (0, 0)
        batch_sizes = batch_sizes_of(run, resumed)
        data = feed.examples(batch_sizes, trackers.note) if feed else TrainData(corpus, run, batch_sizes)
        if group.is_primary:
            directory.begin(run, spec, tokenizer, corpus.path if source else None)
            if not resumed:
                keep_generation(run, directory.path)
                if run.model.init != "random" and not run.data.chat and _lacks_beginning(tokenizer):
                    trackers.note(_NO_BEGINNING)
        trackers.start(_header(run, engine, corpus, data), start)
        recorder = Recorder(run, trackers, start, tokens, data.taken, engine.token_seconds)
        profile = closing.enter_context(Profile(run, engine.trace, directory.profile if group.is_primary else None))
        stop = stop or closing.enter_context(stop_signals())

        step, evaluation, ended_by = start, {}, 0
        for step, batch in enumerate(data.batches(start, engine.rows), start + 1):
            asked_to_stop = stop.signal  # once: a signal may come at any moment
            with profile.of(step, recorder.flush):
                recorder.dispatched(step, engine.train_step(batch, asked_to_stop))
            ended_by = asked_to_stop if group.size == 1 else recorder.stop
            last, stopping = step == run.train.steps, ended_by != 0
            evaluating, sampling = is_due(eval_every, step, last), is_due(run.train.sample_every, step, last)
            saving = is_due(run.checkpoint.every, step, last) or last or stopping
            if evaluating or sampling or saving:
                with recorder.paused():
                    if not recorder.finite:
                        break
                    if evaluating:
                        evaluation = {"step": step, **evaluate(engine, corpus, run)}
                        trackers.evaluation(evaluation)
                    if sampling:
                        trackers.sample(step, run.train.sample_prompt, write_sample(engine, tokenizer, run, prompt))
                    if saving and engine.is_finite():
                        manifest = _manifest(run, engine, step, recorder.tokens, evaluation)
                        manifest |= {"batch_sizes": batch_sizes, "identity": identity(step)}
                        manifest |= {"base": started_as.model.init} if run.lora.rank else {}
                        checkpoints.save(engine.save, manifest)
                    elif saving:
                        raise _not_finite(recorder, checkpoints)
            if stopping or not recorder.finite:
                break

        recorder.flush()
        checkpoints.wait()
        if not recorder.finite:
            raise _not_finite(recorder, checkpoints)
        ended_early = ended_by if step < run.train.steps else None
        if ended_early:
            trackers.note(f"stopped after step {step} and saved; the same command goes on from there")
        if group.is_primary:
            write_report(directory.path)
        seconds, early, shown = time.monotonic() - started, ended_early is not None, _summary(evaluation)
        trackers.finish(Summary(run.place, step, seconds, run.train.sample_prompt, early, **shown))
        return Outcome(run.place, step, evaluation, ended_early)


def _lacks_beginning(tokenizer: Tokenizer) -> bool:
    return tokenizer.begins_elsewhere and not tokenizer.beginning


def prepare_once(run: Run, source: Source | None, console: Console, group: Group) -> Corpus:
    """The data of the run; one process makes what isn't there yet, while the others wait, and then each that doesn't
    share its store."""
    if not group.is_primary:
        group.barrier("prepared", _PREPARE_SECONDS)
    corpus = prepare(run, source=source, on_progress=console.prepare_progress, on_note=console.note)
    if group.is_primary:
        group.barrier("prepared", _PREPARE_SECONDS)
    group.barrier("prepared by all", _PREPARE_SECONDS)
    return corpus


def resolve_spec(run: Run, corpus: Corpus, is_stored: bool = True) -> ModelSpec:
    """The architecture with its vocabulary: the tokenizer's size, unless the run file asks for a larger one.

    A checkpoint may have fewer than its own tokenizer (Gemma 3 of 1B: its token for images has no place in the table),
    which is good where the text has none of the others.

    Arguments:
        run: the run.
        corpus: its data.
        is_stored: whether the corpus holds all the tokens, and not just some, while others come as it trains.

    Raises:
        UserError: the model's vocabulary is smaller than the tokenizer's, and the text or no checkpoint asks for more.
    """
    spec, needed = run.model.spec, corpus.vocab_size
    if not spec.vocab_size:
        return spec.model_copy(update={"vocab_size": needed})
    if spec.vocab_size >= needed:
        return spec
    if run.model.init == "random":
        raise UserError(
            f"model.vocab_size = {spec.vocab_size}: must be at least the tokenizer's {needed}; set it to that"
        )
    if not is_stored:
        raise UserError(
            f"model.init = {run.model.init!r}: has a vocabulary of {spec.vocab_size}, and the tokenizer of {needed}; "
            "prepare the text before (no data.stream), to see whether it holds any of the others"
        )
    if (highest := corpus.highest_id) >= spec.vocab_size:
        raise UserError(
            f"model.init = {run.model.init!r}: has a vocabulary of {spec.vocab_size}, and the text holds the "
            f"tokenizer's id {highest}; use the checkpoint's own tokenizer (leave out tokenizer.kind), or text without "
            "that special token"
        )
    return spec


def evaluate(engine: Engine, corpus: Corpus, run: Run) -> dict[str, float]:
    """Loss over the fixed set of validation batches.

    Returns:
        `val_loss` (nats a token), `val_perplexity`, and `val_bits_per_byte` where the documents' bytes are known:
        the loss in bits times the tokens a byte of the whole validation split, so that tokenizers compare. Of pairs
        `val_loss` alone, the mean of their losses.

    Raises:
        UserError: the validation split is too short, or holds nothing that is to be learned.
    """
    sums = [engine.eval_step(batch) for batch in eval_batches(corpus, run, engine.rows)]
    counted = sum(float(tokens) for _, tokens in sums)
    if not counted:
        raise UserError(
            "data.validation: no token of the validation batches is to be learned; raise train.eval_batches or "
            "train.sequence_length, or hold out more"
        )
    loss = sum(float(total) for total, _ in sums) / counted
    if run.data.packing == "pairs":
        return {"val_loss": loss}
    values = {"val_loss": loss, "val_perplexity": math.exp(min(loss, 700.0))}
    # Of conversations just the answers count, whose bytes aren't known.
    sizes = [None if split.is_weighted else split.byte_count for split in corpus.validation]
    if all(sizes):
        tokens = sum(split.token_count for split in corpus.validation)
        values["val_bits_per_byte"] = loss / math.log(2) * tokens / sum(size or 0 for size in sizes)
    return values


def sample_prompt(run: Run, tokenizer: Tokenizer) -> list[int]:
    """The ids of `train.sample_prompt`; without one, an end of text.

    Raises:
        UserError: it leaves no room to write.
    """
    prompt = [*tokenizer.beginning, *tokenizer.encode(run.train.sample_prompt)] or [tokenizer.end_of_text]
    if run.train.sample_every and len(prompt) >= run.train.sequence_length:
        raise UserError(
            f"train.sample_prompt = {run.train.sample_prompt[:40]!r}: its {len(prompt)} tokens must be fewer than "
            f"train.sequence_length = {run.train.sequence_length}; shorten it"
        )
    return prompt


def write_sample(engine: Engine, tokenizer: Tokenizer, run: Run, prompt: list[int]) -> str:
    """What the model writes after a prompt, within the length that it is trained on."""
    room = min(SAMPLE_TOKENS, run.train.sequence_length - len(prompt))
    steps = engine.generate([prompt], room, tokenizer.end_of_text, Sampling(seed=run.seed))
    return tokenizer.decode(token for (token,) in steps if token is not None)


def is_due(every: int, step: int, last: bool) -> bool:
    """Whether something that happens every so many steps, and at the last, happens now; `every` 0: never."""
    return every > 0 and (last or step % every == 0)


def evaluates(run: Run, corpus: Corpus) -> bool:
    """Whether the run is evaluated as it goes.

    Raises:
        UserError: it should be, and the validation split is too short for a single example.
    """
    if run.train.eval_every == 0 or not corpus.validation:
        return False
    eval_batches(corpus, run)
    return True


def _header(run: Run, engine: Engine, corpus: Corpus, data: Batches) -> dict[str, str]:
    t, packing = run.train, run.data.packing
    amount = "tokens made on the way" if run.data.stream else f"{corpus.train_tokens:,} tokens"
    active = f", {engine.active_parameters:,} active" if engine.active_parameters < engine.parameters else ""
    share = engine.trained_parameters / engine.parameters
    adapters = f"; LoRA trains {engine.trained_parameters:,} more ({share:.2%})" if run.lora.rank else ""
    return {
        "model": f"{run.model.preset or run.model.init}, {engine.parameters:,} parameters{active}{adapters}",
        "engine": f"{run.engine} on {engine.description}",
        "data": f"{_sources(run, corpus)}: {amount}, vocabulary {corpus.vocab_size:,}",
        **({} if packing == "stream" else {"packing": f"{packing}, {data.padding:.2%} of places are padding"}),
        "batch": f"{t.batch_size} sequences of {t.sequence_length} = {t.batch_size * t.sequence_length:,} tokens",
    }


def _sources(run: Run, corpus: Corpus) -> str:
    if isinstance(run.data.train, str):
        return run.data.train
    names = corpus.names[:_NAMED_SOURCES]
    return ", ".join(names) + (f" and {more} more" if (more := len(corpus.names) - len(names)) else "")


def _manifest(run: Run, engine: Engine, step: int, tokens: int, evaluation: dict[str, float]) -> dict[str, Any]:
    return {
        "format": 1,
        "step": step,
        "tokens": tokens,
        "engine": run.engine,
        "mesh": run.mesh.model_dump(),
        "parameters": engine.parameters,
        "trained_parameters": engine.trained_parameters,
        "val_loss": evaluation["val_loss"] if evaluation.get("step") == step and _is_finite(evaluation) else None,
    }


def _not_finite(recorder: Recorder, checkpoints: Checkpoints) -> UserError:
    checkpoints.wait()
    committed = checkpoints.committed()
    good = f"the last good checkpoint is {committed[-1].folder}" if committed else "there is no checkpoint yet"
    what = "" if not recorder.finite else ", and the update left parameters"
    return UserError(
        f"step {recorder.step}: loss = {recorder.loss}, gradient norm = {recorder.grad_norm}{what}: not finite, so "
        f'training stopped; {good}. Lower optimizer.learning_rate, or set train.on_nonfinite = "skip" to pass such '
        "steps over."
    )


def _is_finite(evaluation: dict[str, float]) -> bool:
    return math.isfinite(evaluation["val_loss"])


def _summary(evaluation: dict[str, float]) -> dict[str, float]:
    return {key: evaluation[key] for key in ("val_loss", "val_bits_per_byte") if key in evaluation}
