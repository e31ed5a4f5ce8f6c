"""Where a run goes on: what it starts from, what must be as it was, and the newest sound checkpoint."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshwright.checkpoints import Checkpoint, Checkpoints, check_identity
from meshwright.config import Run
from meshwright.data.corpus import Corpus
from meshwright.data.mixing import stages_of
from meshwright.data.order import with_batch_size
from meshwright.engines.base import RESTORED, Engine
from meshwright.errors import UserError
from meshwright.launch.group import ALONE, Group
from meshwright.models.spec import ModelSpec
from meshwright.rundir import RunDirectory

_SECONDS = 24 * 3600.0  # for a checkpoint to come from an object store; a process that dies is noticed long before


def check_steps(run: Run, checkpoints: Checkpoints) -> None:
    """Refuse a run that has gone beyond its end.

    Raises:
        UserError: it has.
    """
    own = checkpoints.committed()
    if own and own[-1].step > run.train.steps:
        raise UserError(
            f"train.steps = {run.train.steps}: {own[-1].step} are done, as {own[-1].folder} says; raise it to train "
            "on, or give the run another name or run_dir to start afresh"
        )


def with_start(run: Run, corpus: Corpus, checkpoints: Checkpoints, note: Callable[[str], None], group: Group) -> Run:
    """The run, with `model.init` as the engine is to start: `RESTORED` where a checkpoint of its own is gone on from,
    but under LoRA what that one is based on; and of another run's directory the folder of its newest sound one."""
    init = run.model.init
    if own := checkpoints.committed():
        init = own[-1].manifest.get("base", RESTORED)
    elif init != "random" and not init.startswith("hf:"):
        theirs = Checkpoints(RunDirectory(Path(init)).checkpoints, 1, commits=False)
        found = next(_sound_for_all(theirs, note, group), None)
        if found is None:
            raise UserError(f"model.init = {init!r}: has no checkpoint that can be read; train it first")
        if (engine := found.manifest["engine"]) != run.engine:
            raise UserError(
                f'model.init = {init!r}: was trained with engine = "{engine}"; write it with `meshwright export` and '
                "start from that, as hf:<folder>"
            )
        key = "tokenizer (fingerprint)"
        check_identity(
            found,
            {key: data_identity(corpus)[key]},
            f"Take its tokenizer: leave [tokenizer] out, or set tokenizer.kind = 'hf:{init}/tokenizer'.",
        )
        init = str(found.folder.absolute())
    elif run.lora.rank and (folder := Path(init.removeprefix("hf:")).expanduser()).is_dir():
        init = f"hf:{folder.absolute()}"  # it is needed again, maybe from elsewhere
    return run.model_copy(update={"model": run.model.model_copy(update={"init": init})})


def data_identity(corpus: Corpus) -> dict[str, str]:
    """What tells the data of one run from those of another."""
    return {
        "tokenizer (fingerprint)": corpus.tokenizer_fingerprint[:16],
        "data (fingerprint)": corpus.fingerprint[:16],
    }


def run_identity(run: Run, spec: ModelSpec) -> dict[str, Any]:
    """What must stay the same in a run file for training to go on as if nothing had happened."""
    return {
        "engine": run.engine,
        "seed": run.seed,
        **{f"model.{key}": value for key, value in spec.model_dump().items()},
        **(
            {f"lora.{key}": value for key, value in run.lora.model_dump().items()}
            if run.lora.rank
            else {"lora.rank": 0}
        ),
        "data.packing": run.data.packing,
        **({"data.document_mask": run.data.document_mask} if run.data.packing == "packed" else {}),
        **({"dpo.beta": run.dpo.beta} if run.data.packing == "pairs" else {}),
        # The average that is evaluated can't be had from the state without the beta1 that made it.
        **({"optimizer.beta1": run.optimizer.beta1} if run.optimizer.kind == "schedule_free" else {}),
        "train.sequence_length": run.train.sequence_length,
    }


def identity_of(run: Run, spec: ModelSpec, corpus: Corpus, engine: Engine, step: int) -> dict[str, Any]:
    mixing = {}
    if len(corpus.stores) > 1:  # weights of later steps may be changed
        stages = [[start, list(shares)] for start, shares in stages_of(corpus.weights) if start < step]
        mixing = {f"data.train (shares of the sources before step {step})": stages}
    return {**run_identity(run, spec), **data_identity(corpus), **mixing, **engine.identity}


def batch_sizes_of(run: Run, resumed: Checkpoint | None) -> list[list[int]]:
    """The batch sizes of all steps, `[from_step, size]` each: those of the checkpoint, then `train.batch_size`."""
    if resumed is None:
        return [[0, run.train.batch_size]]
    # A checkpoint made before sizes could change has its one size among what must stay the same.
    only = resumed.manifest["identity"].get("train.batch_size", run.train.batch_size)
    before = resumed.manifest.get("batch_sizes", [[0, only]])
    return with_batch_size(before, resumed.step, run.train.batch_size)


def resume(
    engine: Engine,
    checkpoints: Checkpoints,
    identity: Callable[[int], dict[str, Any]],
    note: Callable[[str], None],
    group: Group = ALONE,
) -> Checkpoint | None:
    """Put the engine where the newest sound checkpoint left it.

    Arguments:
        engine: freshly made.
        checkpoints: the run's.
        identity: what must be as it was, for a checkpoint of so many updates.
        note: told of each checkpoint that is passed over, and why.
        group: the processes that train together; all take up the same checkpoint.

    Returns:
        The checkpoint gone on from; None: the run has none yet.

    Raises:
        UserError: the newest sound one belongs to another run, or there are some and none can be read.
    """
    passed = []

    def pass_over(text: str) -> None:
        passed.append(text)
        note(text)

    for checkpoint in _sound_for_all(checkpoints, pass_over, group):
        advice = "Undo the change, or give the run another name or run_dir to start afresh."
        check_identity(checkpoint, identity(checkpoint.step), advice)
        problem = None
        try:
            engine.restore(checkpoint.folder)
        except UserError:
            raise
        except Exception as error:
            problem = _first_line(error)
        problems = [one for one in group.gather(problem, "restored", _SECONDS) if one]
        if not problems:
            checkpoints.set_aside(checkpoint.step, note)
            return checkpoint
        pass_over(f"checkpoint {checkpoint.folder} skipped: {problems[0]}")
    if passed:
        raise UserError(
            f"{checkpoints.folder}: no checkpoint here can be read; move the folder away to start afresh, "
            "or put a whole checkpoint back"
        )
    return None


def _sound_for_all(checkpoints: Checkpoints, note: Callable[[str], None], group: Group) -> Iterator[Checkpoint]:
    sound = checkpoints.sound(note) if group.is_primary else iter(())
    while True:
        candidate = next(sound, None)
        step = group.broadcast(candidate.step if candidate else None, "checkpoint", _SECONDS)
        if step is None:
            return
        found = candidate or checkpoints.at(step)
        group.barrier("checkpoint fetched", _SECONDS)  # where they read it together, each waits for less
        yield found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
