"""What the command line does, from Python: train, open a run directory, read it, evaluate, generate, report.

The seams of `train` are shown at work in `docs/extending.md`.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright import trainer
from meshwright.checkpoints import Checkpoint, Checkpoints, check_identity
from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.documents import Source
from meshwright.data.prepare import prepare as prepare_corpus
from meshwright.data.show import View, look
from meshwright.data.store import SPLITS
from meshwright.data.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from meshwright.engines.base import RESTORED, Engine, Sampling
from meshwright.engines.torch.support import check_supported
from meshwright.errors import UserError
from meshwright.hub.generation import ends_of, kept_generation
from meshwright.launch.devices import idle_card, prepare_devices
from meshwright.launch.group import ALONE, Group
from meshwright.launch.joining import not_installed
from meshwright.models.spec import ModelSpec
from meshwright.resuming import data_identity, run_identity
from meshwright.rundir import RunDirectory
from meshwright.storage.mirror import Reader, local_run
from meshwright.storage.store import is_remote
from meshwright.track.console import Console, make_console
from meshwright.track.metrics import Table, as_table, read_lines, read_metrics
from meshwright.track.report import write_report

if TYPE_CHECKING:
    import optax

    from meshwright.engines.jax.engine import ModelMaker
    from meshwright.engines.jax.step import Metric
    from meshwright.hub.write import Export
    from meshwright.planning import Plan


def prepare(run: Run, *, source: Source | None = None, console: Console | None = None) -> Corpus:
    """Make the token stores of a run, or open those that are there.

    Arguments:
        run: a checked run file.
        source: documents from Python in place of `data.train`.
        console: where progress is shown; None: standard output.

    Raises:
        UserError: the source or the tokenizer can't be used as the run file says.
    """
    if run.data.stream:
        raise UserError("data.stream = true: has nothing to prepare; `meshwright train` makes the tokens on the way")
    console = console or make_console()
    ways: dict[str, Any] = {"on_progress": console.prepare_progress, "on_note": console.note}
    with ExitStack() as closing:
        closing.callback(console.close)
        if run.launch.kind == "ray":
            from meshwright.launch.ray_data import RayEncoding

            ways["encode"] = closing.enter_context(RayEncoding(run))
        return prepare_corpus(run, source=source, **ways)


def show_data(run: Run, *, count: int = 3, split: str = "train") -> View:
    """Decode the first examples of a run as the model will see them; prepares the data if needed.

    Arguments:
        run: a checked run file.
        count: how many.
        split: `train` or `validation`.

    Returns:
        The examples; `meshwright.track.view.show_view` prints them.

    Raises:
        UserError: the data can't be prepared, or there is no such split, or it is too short for one example.
    """
    if split not in SPLITS:
        raise UserError(f"split = {split!r}: must be one of {', '.join(SPLITS)}")
    return look(prepare(run, console=make_console(sys.stderr)), run, count, split)


def train(
    run: Run,
    *,
    source: Source | None = None,
    model: "ModelMaker | None" = None,
    optimizer: "optax.GradientTransformation | None" = None,
    metrics: "dict[str, Metric] | None" = None,
    console: Console | None = None,
    group: Group = ALONE,
) -> trainer.Outcome:
    """Train a run; prepares its data if needed, and goes on where an earlier call stopped.

    Arguments:
        run: a checked run file.
        source: documents from Python in place of `data.train`.
        model: makes the model from `(spec, rngs=…)`, in place of `meshwright.models.decoder.Decoder`.
        optimizer: an Optax update rule, in place of the run file's `[optimizer]` and `[schedule]`; gradients still
            come in clipped by `optimizer.clip_norm`.
        metrics: scalars of a `meshwright.engines.jax.step.Update`, by name; they are logged beside the loss.
        console: where progress is shown; None: standard output.
        group: the processes that train together, each calling this; under `launch.kind = "processes"` the command
            `meshwright train` starts them. Under `"ray"` this call starts them itself, and takes no `source`.

    Returns:
        Where the run lies, how many steps are done, and the last evaluation.

    Raises:
        UserError: something in the run file, the data or the run directory must be mended first, or the loss stopped
            being finite.
    """
    if run.engine == "torch":  # it says so itself, but when the data is prepared
        check_supported(run, run.model.spec, model, optimizer, metrics)
    if run.launch.kind == "ray":
        if source is not None:
            raise UserError('launch.kind = "ray": reads what data.train names; leave out `source`, or prepare it first')
        return _train_on_ray(run, console or make_console(), model=model, optimizer=optimizer, metrics=metrics)
    if run.launch.kind == "processes" and group is ALONE:
        raise UserError(
            'launch.kind = "processes": is for the command `meshwright train`, which starts the processes; from Python '
            'set launch.kind = "local"'
        )
    if run.data.stream and source is not None:
        raise UserError("data.stream = true: reads what data.train names; leave out one of it and `source`")
    if run.engine == "jax":
        prepare_devices(run)
    console = console or make_console()
    with ExitStack() as closing:
        closing.callback(console.close)
        if run.engine == "jax" and group.is_primary and (idle := idle_card()):
            console.note(idle)
        feed = None
        if run.data.stream:
            from meshwright.launch.ray_stream import StreamFeed

            feed = closing.enter_context(StreamFeed(run))
        parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "metrics": metrics}
        return trainer.train(run, partial(make_engine, **parts), console, source, group, feed)


def plan(run: Run, *, devices: int | None = None, compiled: bool = True) -> "Plan":
    """Find out how a run would lie on its devices and what it would take; nothing is prepared or allocated.

    Arguments:
        run: a checked run file.
        devices: how many the run is to have; None: as many as it would have here.
        compiled: whether to compile the train step, for XLA's count of its memory.

    Returns:
        The numbers; `print` it for all of them in words.

    Raises:
        UserError: the mesh fits neither the devices nor the model or the batch, or the tokenizer can't be had.
    """
    from meshwright.planning import make_plan

    if run.engine != "jax":
        raise UserError(f'engine = "{run.engine}": plans are made for the JAX engine alone; override engine="jax"')
    if run.launch.kind == "local":
        prepare_devices(run)
    return make_plan(run, devices=devices, compiled=compiled)


def open_run(path: str | Path, *, checkpoint: str | int = "newest", model: "ModelMaker | None" = None) -> "TrainedRun":
    """Open the directory of a run that was trained, or that still trains.

    Arguments:
        path: the run directory; also `s3://bucket/path` or `gs://bucket/path`.
        checkpoint: `newest`, `best` (by validation loss), or a step; read when the model is first needed.
        model: what was given to `train`, where the model was a researcher's own.

    Raises:
        UserError: it isn't a run directory.
    """
    return TrainedRun(path, checkpoint, model)


class TrainedRun:
    """A run directory, opened by `open_run`. The model is loaded when it is first needed."""

    def __init__(self, path: str | Path, checkpoint: str | int, model: "ModelMaker | None"):
        self.path = local_run(path)
        self.files = RunDirectory(self.path)
        self._reader = Reader(str(path)) if is_remote(path) else None
        self.run = self.files.load_run()
        self._wanted = checkpoint
        self._model = model

    def metrics(self) -> Table:
        """Training records as columns: a dictionary of float64 arrays, which `pandas.DataFrame` takes as it is."""
        return as_table([record for record in read_metrics(self.files.metrics) if "loss" in record])

    def evaluations(self) -> Table:
        """Evaluation records as columns, like `metrics`."""
        return as_table([record for record in read_metrics(self.files.metrics) if "val_loss" in record])

    def samples(self) -> list[dict[str, Any]]:
        """The texts written during training, each with `step`, `prompt` and `text`."""
        return read_lines(self.files.samples)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return load_tokenizer(self.files.tokenizer)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that was asked for.

        Raises:
            UserError: there is none such.
        """
        checkpoints = Checkpoints(self.files.checkpoints, self.run.checkpoint.keep, reader=self._reader)
        by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints.committed()}
        if not by_step:
            raise UserError(f"{self.path}: holds no checkpoint yet; train it first: meshwright train RUN.toml")
        newest = by_step[max(by_step)]
        if self._wanted == "newest":
            return newest
        if self._wanted == "best":
            return checkpoints.best() or newest
        if str(self._wanted).isdecimal() and int(self._wanted) in by_step:
            return by_step[int(self._wanted)]
        raise UserError(f"checkpoint = {self._wanted!r}: must be newest, best, or one of the steps {sorted(by_step)}")

    @cached_property
    def engine(self) -> Engine:
        """The engine, with the checkpoint's parameters; it holds no optimizer state.

        Raises:
            UserError: the checkpoint is damaged, or holds another model.
        """
        base = self.checkpoint.manifest.get("base", RESTORED)
        run = self.run.model_copy(update={"model": self.run.model.model_copy(update={"init": base})})
        engine = make_engine(run, run.model.spec, model=self._model, training=False)
        if damage := self.checkpoint.damage():
            raise UserError(f"{self.checkpoint.folder}: damaged: {damage}; choose another checkpoint")
        model = {**run_identity(self.run, self.run.model.spec), **engine.identity}
        model = {key: value for key, value in model.items() if key.startswith(("model", "lora"))}
        check_identity(self.checkpoint, model, "Open the run with the model that it was trained with.")
        try:
            engine.restore(self.checkpoint.folder)
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"{self.checkpoint.folder}: can't be read ({type(error).__name__}); choose another checkpoint"
            ) from error
        return engine

    def evaluate(self) -> dict[str, float]:
        """Loss on the run's validation batches: `step`, and what `meshwright.trainer.evaluate` gives.

        Raises:
            UserError: the data isn't what the run was trained with.
        """
        console = make_console(sys.stderr)
        if self.run.data.stream:
            from meshwright.launch.ray_stream import open_stream

            corpus: Corpus = open_stream(self.run, console.prepare_progress, console.note, self.tokenizer)
        else:
            corpus = prepare(self.run, console=console)
        advice = "Put the data back as it was when the run was trained."
        check_identity(self.checkpoint, data_identity(corpus), advice)
        return {"step": self.checkpoint.step, **trainer.evaluate(self.engine, corpus, self.run)}

    def generate(
        self,
        prompts: str | list[str],
        *,
        max_tokens: int | None = None,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """What the model writes after each prompt, as one batch.

        Arguments:
            prompts: one or several; an empty one stands for the start of a document.
            max_tokens: the most tokens to add; None: 200, or fewer to stay within `train.sequence_length`.
            temperature, top_k, top_p, seed: how tokens are chosen; see `meshwright.engines.base.Sampling`.

        Raises:
            UserError: prompt and continuation don't fit the context, or tokens can't be chosen so.
        """
        pieces = self.stream(prompts, Sampling(temperature, top_k, top_p, seed), max_tokens=max_tokens)
        return ["".join(column) for column in zip(*pieces, strict=True)]

    def stream(
        self, prompts: str | list[str], sampling: Sampling | None = None, *, max_tokens: int | None = None
    ) -> Iterator[list[str]]:
        """As `generate`, yielding the text of each prompt piece by piece; never half a character."""
        sampling = sampling or Sampling()
        sampling.check()
        prompts = [prompts] if isinstance(prompts, str) else prompts
        if not prompts:
            return
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"max_tokens = {max_tokens}: must be 1 or more")
        for prompt in prompts:
            if any("\ud800" <= letter <= "\udfff" for letter in prompt):
                raise UserError(f"prompt = {prompt[:40]!r}: isn't text in UTF-8; give it in that encoding")
        stop = self.tokenizer.end_of_text
        others = {*ends_of(stop, kept_generation(self.files.path))} - {stop}
        ids = [[*self.tokenizer.beginning, *self.tokenizer.encode(prompt)] or [stop] for prompt in prompts]
        longest, context = max(len(one) for one in ids), self.run.model.context_length
        if max_tokens is None:
            trained = self.run.train.sequence_length  # positions beyond were never trained: go there only if one must
            max_tokens = max(min(200, (trained if longest < trained else context) - longest), 1)
        decoders = [StreamDecoder(self.tokenizer) for _ in ids]
        over = [False] * len(ids)
        for tokens in self.engine.generate(ids, max_tokens, stop, sampling):
            over = [ended or token in others for ended, token in zip(over, tokens, strict=True)]
            if all(over):
                break
            tokens = [None if ended else token for ended, token in zip(over, tokens, strict=True)]
            yield [
                "" if token is None else decoder.push(token) for decoder, token in zip(decoders, tokens, strict=True)
            ]
        yield [decoder.flush() for decoder in decoders]

    def export(
        self,
        out: str | Path,
        *,
        dtype: str = "float32",
        shard_bytes: int | None = None,
        adapter: bool = False,
    ) -> "Export":
        """Write the model for Hugging Face's libraries, and prove that what was written is the run's model.

        Arguments:
            out: the folder to make.
            dtype: of the tensors: `float32` or `bfloat16`.
            shard_bytes: the most bytes of tensors in one file; None: 5 GB.
            adapter: whether to write a run's adapters alone, in float32, for the library `peft`; else they are merged.

        Raises:
            UserError: the folder isn't empty, the model has no such form, or the proof failed.
        """
        from meshwright.hub.real_tokens import real_tokens
        from meshwright.hub.write import SHARD_BYTES, Trained, export, export_adapter

        if adapter and dtype != "float32":
            raise UserError(f"dtype = {dtype!r}: adapters are written in float32; leave it out")
        step = self.checkpoint.step
        losses: dict[str, float] = {}
        for record in read_metrics(self.files.metrics):
            if record.get("step", step + 1) <= step:
                losses |= {key: record[key] for key in ("loss", "val_loss", "val_bits_per_byte") if key in record}
        said = kept_generation(self.files.path)
        trained = Trained(self.run, self.engine, self.tokenizer, self.checkpoint.manifest, said, losses)
        tokens_BT = real_tokens(self.run, self.tokenizer)
        if adapter:
            return export_adapter(Path(out), trained, tokens_BT)
        return export(Path(out), trained, tokens_BT, dtype=dtype, shard_bytes=shard_bytes or SHARD_BYTES)

    def report(self) -> Path:
        """Write `report.html` into the run directory, and return its path."""
        return write_report(self.path)


def _train_on_ray(run: Run, console: Console, **parts: Any) -> trainer.Outcome:
    from meshwright.launch.ray_cluster import ray_cluster
    from meshwright.launch.ray_train import train_on_ray

    with ExitStack() as closing:
        closing.callback(console.close)
        ray = closing.enter_context(ray_cluster(run.launch.address, 'launch.kind = "ray"', cpus=run.launch.most))
        prepare(run, console=console)
        return train_on_ray(ray, run, console, parts)


def make_engine(run: Run, spec: ModelSpec, *, model: "ModelMaker | None" = None, **more: Any) -> Engine:
    """The engine of a run; arguments are as of `train`."""
    if run.engine == "torch":
        return _make_torch_engine(run, spec, model=model, **more)
    from meshwright.engines.jax.engine import JaxEngine
    from meshwright.models.decoder import Decoder

    return JaxEngine(run, spec, model=model or Decoder, **more)


def _make_torch_engine(run: Run, spec: ModelSpec, **more: Any) -> Engine:
    try:
        from meshwright.engines.torch.engine import TorchEngine
    except ModuleNotFoundError as error:
        raise not_installed(error) from None
    return TorchEngine(run, spec, **more)
