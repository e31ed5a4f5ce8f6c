"""The second promise: a crash, a signal or damage never changes the training, and nothing changes unseen."""

import random
import signal
from pathlib import Path

import pytest
from helpers import kill, meshwright, run_values, start_meshwright, wait_for, write_run
from tiny_runs import evaluations, losses, make, step_reached, train

import meshwright as mw
from meshwright.checkpoints import Checkpoints
from meshwright.errors import UserError

pytestmark = pytest.mark.usefixtures("in_folder_with_texts")


def test_resume_is_exact_and_skips_nothing():
    train(make(name="whole"))
    train(make(name="parts", train={"steps": 5}))
    first = losses("runs/parts")
    outcome, shown = train(make(name="parts"))
    assert "5/12" in shown
    assert outcome.step == 12
    # With a cosine schedule the length of the run sets the learning rate, so the first part must differ a little ...
    assert first != {step: loss for step, loss in losses("runs/whole").items() if step <= 5}
    constant = {"schedule": {"kind": "constant"}}
    train(make(name="whole2", **constant))
    train(make(name="parts2", train={"steps": 5}, **constant))
    train(make(name="parts2", **constant))
    # ... and with a constant one nothing does.
    assert losses("runs/parts2") == losses("runs/whole2")
    assert len(losses("runs/parts2")) == 12


@pytest.mark.parametrize("kind", ["lion", "muon", "schedule_free"])
def test_resume_is_exact_with_every_optimizer(kind):
    sections = {"optimizer": {"kind": kind}, "schedule": {"kind": "constant"}}
    train(make(name="whole", **sections))
    train(make(name="parts", train={"steps": 5}, **sections))
    train(make(name="parts", **sections))
    assert losses("runs/parts") == losses("runs/whole")
    train(make(name="adamw", schedule={"kind": "constant"}))
    assert losses("runs/adamw") != losses("runs/whole")


def test_a_finished_run_trains_no_more():
    train(make())
    before = Path("runs/tiny/metrics.jsonl").read_bytes()
    outcome, shown = train(make())
    assert outcome.step == 12
    assert "12" in shown
    assert Path("runs/tiny/metrics.jsonl").read_bytes() == before
    resolved = Path("runs/tiny/run.toml").read_bytes()
    with pytest.raises(UserError, match=r"train.steps = 8: 12 are done, as .*step_00000012 says; raise it to train on"):
        train(make(train={"steps": 8}))
    assert Path("runs/tiny/run.toml").read_bytes() == resolved


@pytest.mark.parametrize("packing", ["stream", pytest.param("packed", marks=pytest.mark.slow)])
def test_killed_anywhere_goes_on_bit_for_bit(packing, tmp_path):
    """SIGKILL at random moments, most of them while a save is under way; then the same command again."""
    values = run_values(
        "texts",
        data={"packing": packing},
        train={"steps": 40, "eval_every": 10},
        checkpoint={"every": 2},
        model={"dropout": 0.1},
    )
    write_run(tmp_path / "whole.toml", {**values, "name": "whole"})
    write_run(tmp_path / "broken.toml", {**values, "name": "broken"})
    done = meshwright("train", "whole.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    choose = random.Random(1)
    reached = [killed_at(4 + 8 * n, tmp_path, inside_save=n % 2 == 1, late_by=choose.randrange(3)) for n in range(4)]
    assert len(set(reached)) > 2  # it did get on between the kills
    done = meshwright("train", "broken.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert losses("runs/broken") == losses("runs/whole")
    assert len(losses("runs/broken")) == 40
    assert evaluations("runs/broken") == evaluations("runs/whole")


def killed_at(step: int, folder: Path, inside_save: bool, late_by: int) -> int:
    """Train until a step is reached or being saved, kill, and return the newest committed step."""
    checkpoints = folder / "runs/broken/checkpoints"

    def reached() -> bool:
        if inside_save:
            return any(checkpoints.glob(f"step_{step:08d}.partial"))
        return step_reached(folder / "runs/broken") >= step + late_by

    process = start_meshwright("train", "broken.toml", cwd=folder)
    try:
        wait_for(reached, process)
    finally:
        kill(process)
    return max((checkpoint.step for checkpoint in Checkpoints(checkpoints, 2).committed()), default=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_finishes_the_step_saves_and_says_so(number, code, tmp_path):
    write_run(tmp_path / "run.toml", run_values("texts", train={"steps": 2000}, checkpoint={"every": 1000}))
    process = start_meshwright("train", "run.toml", cwd=tmp_path)
    try:
        wait_for(lambda: step_reached(tmp_path / "runs/tiny") >= 3, process)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        kill(process)
    assert process.returncode == code, err
    assert "Traceback" not in err
    saved = Checkpoints(tmp_path / "runs/tiny/checkpoints", 2).committed()[-1]
    assert saved.step == step_reached(tmp_path / "runs/tiny") < 2000
    assert f"stopped after step {saved.step} and saved; the same command goes on from there" in out


def test_a_stop_at_an_evaluation_loses_nothing(monkeypatch):
    """The step that a signal ends is evaluated and sampled like any other."""
    from contextlib import contextmanager

    from meshwright import trainer
    from meshwright.signals import Stop

    sections = {"train": {"eval_every": 4, "sample_every": 4}}
    train(make(name="whole", **sections))

    class AtStepFour(Stop):
        asked = 0

        @property
        def signal(self):
            self.asked += 1
            return signal.SIGTERM if self.asked >= 4 else 0

        @signal.setter
        def signal(self, _):
            pass

    @contextmanager
    def stop():
        yield AtStepFour()

    with monkeypatch.context() as patch:
        patch.setattr(trainer, "stop_signals", stop)
        outcome, _ = train(make(name="parts", **sections))
    assert (outcome.step, outcome.stopped_by) == (4, signal.SIGTERM)
    train(make(name="parts", **sections))
    assert evaluations("runs/parts") == evaluations("runs/whole")
    assert mw.open_run("runs/parts").samples() == mw.open_run("runs/whole").samples()
    assert len(evaluations("runs/whole")) == 3


DAMAGE = {
    "flipped byte": lambda folder: flip(max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)),
    "cut short": lambda folder: cut(max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)),
    "file missing": lambda folder: next(folder.rglob("_METADATA")).unlink(),
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest half written": lambda folder: cut(folder / "manifest.json"),
}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_newest_is_named_and_skipped(kind):
    train(make(name="whole"))
    train(make(name="damaged"))
    newest = Path("runs/damaged/checkpoints/step_00000012")
    DAMAGE[kind](newest)
    _, shown = train(make(name="damaged"))
    assert f"checkpoint {newest} skipped: " in shown and "is kept as step_00000012.damaged-1" in shown
    assert "resuming at step 8/12" in shown
    assert losses("runs/damaged") == losses("runs/whole")
    assert Checkpoints(newest.parent, 2).committed()[-1].damage() is None
    assert newest.with_name("step_00000012.damaged-1").is_dir()  # what was there is kept


def test_never_starts_over_when_no_checkpoint_can_be_read():
    train(make())
    for manifest in Path("runs/tiny/checkpoints").glob("*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(UserError, match="no checkpoint here can be read; move the folder away to start afresh"):
        train(make())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model": {"layers": 1}}, "model.layers = 1; the checkpoint was made with 2"),
        ({"tokenizer": {"kind": "bpe", "vocab_size": 300}}, "tokenizer (fingerprint) = "),
        ({"data": {"validation": 0.3}}, "data (fingerprint) = "),
        ({"seed": 1}, "seed = 1; the checkpoint was made with 0"),
        ({"train": {"sequence_length": 16}}, "train.sequence_length = 16; the checkpoint was made with 32"),
        ({"optimizer": {"kind": "lion"}}, "optimizer.kind = 'lion'; the checkpoint was made with 'adamw'"),
    ],
)
def test_changed_run_is_refused_with_the_difference(change, expected):
    train(make(train={"steps": 4}))
    before = Path("runs/tiny/run.toml").read_bytes()
    with pytest.raises(UserError) as caught:
        train(make(**change))
    assert expected in str(caught.value)
    assert "step_00000004: can't be used, since the run has changed" in str(caught.value)
    assert Path("runs/tiny/run.toml").read_bytes() == before


def test_schedule_free_goes_on_with_its_beta1_alone():
    """Its state holds one of two averages; the other is made of it and of that number."""
    train(make(train={"steps": 4}, optimizer={"kind": "schedule_free"}))
    with pytest.raises(UserError, match=r"optimizer\.beta1 = 0\.5; the checkpoint was made with 0\.9"):
        train(make(optimizer={"kind": "schedule_free", "beta1": 0.5}))
    train(make(name="adamw", train={"steps": 4}))
    assert train(make(name="adamw", optimizer={"beta1": 0.5}))[0].step == 12


def test_changed_text_is_refused():
    train(make(train={"steps": 4}))
    Path("texts/000.txt").write_text("something else altogether\n")
    with pytest.raises(UserError, match=r"data \(fingerprint\)"):
        train(make())


def test_another_optimizer_is_refused_by_name():
    import optax

    train(make(train={"steps": 4}), optimizer=optax.sgd(0.1))
    with pytest.raises(UserError, match=r"optimizer\.kind = 'adamw'; the checkpoint was made with 'own'"):
        train(make())
    with pytest.raises(
        UserError, match=r"optimizer.*no such array in the checkpoint.*give the optimizer that the checkp"
    ):
        train(make(), optimizer=optax.sgd(0.1, momentum=0.9))


def test_leftovers_of_crashes_are_swept(tmp_path):
    train(make(train={"steps": 4}))
    leftover = tmp_path / "runs/tiny/checkpoints/step_00000003.partial"
    leftover.mkdir()
    (leftover / "data").write_bytes(b"half")
    train(make())
    assert not leftover.exists()
