"""The loop: what it does, records, refuses and leaves."""

import json
import math
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import kill, run_values, start_meshwright, wait_for, write_run
from tiny_runs import losses, make, step_reached, train

import meshwright as mw
from meshwright.checkpoints import Checkpoints
from meshwright.errors import UserError
from meshwright.recorder import Recorder
from meshwright.rundir import RunDirectory

pytestmark = pytest.mark.usefixtures("in_folder_with_texts")


def test_a_whole_run():
    run = make(train={"eval_every": 4, "sample_every": 6, "log_every": 2, "sample_prompt": "the "})
    outcome, shown = train(run)
    assert (outcome.step, outcome.stopped_by) == (12, None)
    trained = mw.open_run("runs/tiny")
    table, evaluations = trained.metrics(), trained.evaluations()
    assert table["step"].tolist() == [1, 2, 4, 6, 8, 10, 12]
    assert table["tokens"].tolist() == [128 * step for step in (1, 2, 4, 6, 8, 10, 12)]
    assert evaluations["step"].tolist() == [4, 8, 12]
    assert table["loss"][-1] < table["loss"][0]
    assert {"learning_rate", "grad_norm", "tokens_per_second", "step_seconds"} <= table.keys()
    assert {"val_loss", "val_perplexity", "val_bits_per_byte"} <= evaluations.keys()
    assert [sample["step"] for sample in trained.samples()] == [6, 12]
    assert mw.load_run("runs/tiny/run.toml").model.vocab_size == 257
    for text in ("step 12/12", "validation loss", "sample", "runs/tiny", "meshwright generate"):
        assert text in shown
    assert "step 12/12" in Path("runs/tiny/log.txt").read_text()


def test_a_trace_of_some_steps():
    import gzip

    train(make(name="without", train={"steps": 4}))
    assert not Path("runs/without/profile").exists()
    train(make(name="with", train={"steps": 4}, profile={"steps": [2, 3]}))
    (trace,) = Path("runs/with/profile").rglob("perfetto_trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert sum("train_step" in event.get("name", "") for event in events) == 2
    assert losses("runs/with")[3] == losses("runs/without")[3]


def test_a_trace_that_is_cut_short_is_whole(monkeypatch):
    from meshwright.engines.jax.engine import JaxEngine

    step, done = JaxEngine.train_step, []

    def fail_at_the_fourth(engine, *arguments):
        done.append(step)
        if len(done) == 4:
            raise KeyboardInterrupt
        return step(engine, *arguments)

    monkeypatch.setattr(JaxEngine, "train_step", fail_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        train(make(train={"steps": 6}, profile={"steps": [2, 50]}))
    assert list(Path("runs/tiny/profile").rglob("perfetto_trace.json.gz"))


def test_a_trace_of_steps_that_never_come_is_refused():
    with pytest.raises(UserError, match=r"profile\.steps"):
        make(train={"steps": 6}, profile={"steps": [7, 8]})


def test_all_processes_wait_around_a_trace():
    from contextlib import nullcontext
    from functools import partial

    from meshwright.profiling import Profile

    for folder in (Path("profile"), None):
        waits: list[int] = []
        run = make(train={"steps": 6}, profile={"steps": [2, 3]})
        with Profile(run, lambda _: nullcontext(), folder) as profile:
            for number in range(1, 7):
                with profile.of(number, partial(waits.append, number)):
                    pass
        assert waits == [2, 3]


def test_a_mistake_leaves_the_checkpoint_under_way_whole(monkeypatch):
    from meshwright.engines.jax.engine import JaxEngine

    save = JaxEngine.save

    def slowly(engine, folder):
        finish = save(engine, folder)
        return lambda: (time.sleep(0.5), finish())

    monkeypatch.setattr(JaxEngine, "save", slowly)
    step, done = JaxEngine.train_step, []

    def fail_at_the_fifth(engine, *arguments):
        done.append(step)
        if len(done) == 5:
            raise ValueError("on purpose")
        return step(engine, *arguments)

    monkeypatch.setattr(JaxEngine, "train_step", fail_at_the_fifth)
    with pytest.raises(ValueError, match="on purpose"):
        train(make(train={"steps": 8}, checkpoint={"every": 4}))
    assert [path.name for path in Path("runs/tiny/checkpoints").iterdir()] == ["step_00000004"]


def test_mfu_where_the_peak_is_known(monkeypatch):
    from meshwright.engines.jax import engine
    from meshwright.engines.jax.estimate import flops_per_token

    train(make(name="unknown"))
    assert not any("mfu" in record for record in mw.open_run("runs/unknown").metrics())
    monkeypatch.setattr(engine, "peak_flops", lambda kind: 1e12)
    train(make(name="float32"))
    assert "mfu" not in mw.open_run("runs/float32").metrics()  # the peak is one of bfloat16
    run = make(name="known", train={"compute_dtype": "bfloat16"})
    _, shown = train(run)
    table = mw.open_run("runs/known").metrics()
    spec = mw.load_run("runs/known/run.toml").model.spec
    wanted = table["tokens_per_second"][1:] * flops_per_token(spec, 32) / 1e12
    np.testing.assert_allclose(table["mfu"][1:], wanted, rtol=1e-9)
    assert "mfu" in shown


def test_bits_per_byte_from_the_documents():
    run = make(train={"eval_every": 12}, tokenizer={"kind": "bpe", "vocab_size": 300})
    outcome, _ = train(run)
    split = mw.prepare(run).stores[0].split("validation")
    documents = [path.read_bytes() for path in Path("texts").glob("*.txt")]
    assert 0 < split.byte_count < sum(map(len, documents))
    assert split.token_count < split.byte_count  # pairs were merged, so a token is more than a byte
    expected = outcome.evaluation["val_loss"] / math.log(2) * split.token_count / split.byte_count
    assert outcome.evaluation["val_bits_per_byte"] == pytest.approx(expected, rel=1e-9)
    assert outcome.evaluation["val_perplexity"] == pytest.approx(math.exp(outcome.evaluation["val_loss"]))
    assert mw.open_run("runs/tiny").evaluate() == pytest.approx(outcome.evaluation, rel=1e-6)


def test_a_nanogpt_pair_and_separated_text_train_to_the_same_losses():
    """The same documents, once as bare uint16 ids, once as one file with separators."""
    texts = [path.read_text() for path in sorted(Path("texts").glob("*.txt"))]
    train_texts, held_out = texts[:50], texts[50:]
    for name, part in (("train", train_texts), ("val", held_out)):
        ids = [token for text in part for token in [*text.encode(), 256]]
        np.array(ids, np.uint16).tofile(f"{name}.bin")
        Path(f"{name}.txt").write_text("<|endoftext|>".join(part))
    sections = {"train": {"eval_every": 6}}
    pair = {"train": "train.bin", "validation": "val.bin"}
    separated = {"train": "train.txt", "validation": "val.txt", "separator": "<|endoftext|>"}
    first, _ = train(make(name="pair", data=pair, **sections))
    second, _ = train(make(name="separated", data=separated, **sections))
    assert losses("runs/pair") == losses("runs/separated")
    assert first.evaluation == pytest.approx(second.evaluation)
    assert "val_bits_per_byte" in first.evaluation
    train(make(name="whole-folder", **sections))
    assert losses("runs/whole-folder") != losses("runs/pair")


def test_evaluation_in_training_changes_nothing():
    train(make(name="plain"))
    train(make(name="looked-at", train={"eval_every": 3, "sample_every": 5}, checkpoint={"every": 2}))
    assert losses("runs/plain") == losses("runs/looked-at")
    assert (Path("runs/looked-at/samples.jsonl").stat().st_size > 0) and not mw.open_run("runs/plain").samples()


def test_keeps_the_newest_and_the_best():
    train(make(train={"eval_every": 2, "steps": 20}, optimizer={"learning_rate": 3e-3}, checkpoint={"every": 2}))
    folder = Path("runs/tiny/checkpoints")
    steps = [checkpoint.step for checkpoint in Checkpoints(folder, 2).committed()]
    table = mw.open_run("runs/tiny").evaluations()
    best = int(table["step"][np.argmin(table["val_loss"])])
    assert steps == sorted({18, 20, best})
    assert mw.open_run("runs/tiny", checkpoint="best").checkpoint.step == best


def test_an_own_source_is_needed_no_more_once_prepared():
    class Numbers:
        def describe(self):
            return {"name": "numbers", "fingerprint": "1"}

        def documents(self):
            return (mw.Document(str(n), f"{n} and {n + 1} make {2 * n + 1}. " * 3) for n in range(60))

    outcome, _ = train(make(train={"eval_every": 6}), source=Numbers())
    assert mw.open_run("runs/tiny").evaluate()["val_loss"] == pytest.approx(outcome.evaluation["val_loss"], rel=1e-6)
    assert mw.load_run("runs/tiny/run.toml").data.train.startswith("stores/")


def test_nonfinite_loss_stops_and_names_the_last_good_checkpoint():
    import jax.numpy as jnp
    import optax

    def poison(step_of_death):
        def update(updates, state, params=None):
            count = state + 1
            return optax.tree.scale(jnp.where(count == step_of_death, jnp.nan, -1e-3), updates), count

        return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)

    with pytest.raises(UserError) as caught:
        train(make(), optimizer=poison(6))
    message = str(caught.value)
    assert message.startswith("step 7: loss = nan")
    assert "the last good checkpoint is runs/tiny/checkpoints/step_00000004" in message
    assert [c.step for c in Checkpoints(Path("runs/tiny/checkpoints"), 2).committed()] == [4]


def test_parameters_that_are_not_finite_are_never_saved():
    import optax

    def nan_at_four(updates, state, params=None):
        import jax.numpy as jnp

        return optax.tree.scale(jnp.where(state == 3, jnp.nan, -1e-3), updates), state + 1

    optimizer = optax.GradientTransformation(lambda params: 0, nan_at_four)
    with pytest.raises(
        UserError, match=r"step 4: .* the update left parameters: not finite.*there is no checkpoint yet"
    ):
        train(make(), optimizer=optimizer)  # step 4 has a finite loss and gradient, and is due to be saved


def test_an_own_model_is_not_opened_as_another():
    from meshwright.models.decoder import Decoder

    class Other(Decoder):
        pass

    train(make(train={"steps": 4}), model=Other)
    assert mw.open_run("runs/tiny", model=Other).generate("the ", max_tokens=2)
    with pytest.raises(UserError, match="Open the run with the model that it was trained with"):
        mw.open_run("runs/tiny").generate("the ", max_tokens=2)


@pytest.mark.parametrize("name", ["loss", "step", "stop", "val_loss"])
def test_metrics_of_reserved_names_or_shapes_are_refused(name):
    with pytest.raises(UserError, match=f"metric '{name}': is the name of a record's own key"):
        train(make(), metrics={name: lambda update: update.loss})
    with pytest.raises(UserError, match=r"metric 'mine': returns an array of shape \(257, 32\)"):
        train(make(), metrics={"mine": lambda update: update.gradients["embedding"]})


def test_two_processes_never_share_a_run_directory(tmp_path):
    write_run(tmp_path / "run.toml", run_values("texts", train={"steps": 100000}))
    process = start_meshwright("train", "run.toml", cwd=tmp_path)
    try:
        wait_for(lambda: step_reached(tmp_path / "runs/tiny") >= 1, process)
        with pytest.raises(UserError, match="another process is training in this run directory"):
            train(make())
    finally:
        kill(process)


def test_a_file_system_without_locks_is_named(monkeypatch):
    import fcntl

    def flock(file, how):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    says = r"run_dir = 'runs/tiny': its file system can't lock a file \(Function"
    with pytest.raises(UserError, match=says), RunDirectory(Path("runs/tiny")).locked():
        pass


def test_a_run_toml_that_lost_its_content_is_written_anew():
    train(make(train={"steps": 4}))
    Path("runs/tiny/run.toml").write_text("")
    Path("runs/tiny/tokenizer/spec.json").unlink()
    _, shown = train(make())
    assert "resuming at step 4/12" in shown
    assert mw.load_run("runs/tiny/run.toml").train.steps == 12
    assert (Path("runs/tiny/tokenizer") / "spec.json").is_file() and not list(Path("runs/tiny").glob("*.partial"))


def test_a_run_toml_of_the_user_is_never_overwritten():
    Path("mine").mkdir()
    Path("mine/run.toml").write_text("# my own notes\n")
    with pytest.raises(UserError, match=r"mine/run\.toml: would be overwritten"):
        train(make(run_dir="mine"))
    assert Path("mine/run.toml").read_text() == "# my own notes\n"


def test_values_are_read_one_step_late():
    events = []

    class OnItsWay:
        def __init__(self, step, name):
            self.step, self.name = step, name

        def __float__(self):
            events.append(f"read {self.step}") if self.name == "loss" else None
            return 1.0

    class Silent:
        def __getattr__(self, _):
            return lambda *_: None

    recorder = Recorder(make(), Silent(), 0, 0, lambda step: {})
    for step in (1, 2, 3):
        events.append(f"dispatch {step}")
        recorder.dispatched(step, {name: OnItsWay(step, name) for name in ("loss", "grad_norm", "tokens")})
    recorder.flush()
    assert events == ["dispatch 1", "dispatch 2", "read 1", "dispatch 3", "read 2", "read 3"]


def test_tensorboard_when_asked():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(make(track={"tensorboard": True}))
    events = EventAccumulator("runs/tiny/tensorboard")
    events.Reload()
    written = {event.step: event.value for event in events.Scalars("train/loss")}
    assert written == pytest.approx(losses("runs/tiny"), rel=1e-6)
    train(make(name="without"))
    assert not Path("runs/without/tensorboard").exists()


def test_vocabulary_smaller_than_the_tokenizer_is_refused():
    with pytest.raises(UserError, match=r"model\.vocab_size = 100: must be at least the tokenizer's 257"):
        train(make(model={"vocab_size": 100}))


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": -1}, {"max_tokens": 0}],
)
def test_a_choice_of_tokens_that_makes_no_sense_is_refused(wrong):
    train(make(train={"steps": 4}))
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=rf"{name} = {value!r}: must be "):
        mw.open_run("runs/tiny").generate("a", **wrong)


def test_generate_and_stream_agree():
    train(make())
    trained = mw.open_run("runs/tiny")
    texts = trained.generate(["the ", "", "a lazy"], max_tokens=20)
    assert len(texts) == 3
    pieces = list(trained.stream(["the ", "", "a lazy"], max_tokens=20))
    assert ["".join(column) for column in zip(*pieces, strict=True)] == texts
    shutil.rmtree("stores")
    assert mw.open_run("runs/tiny").generate("the ", max_tokens=20) == [texts[0]]  # needs the run directory alone
