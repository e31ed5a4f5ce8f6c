"""What a run reads as it goes: another batch size on the way, several sources, packed documents."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from helpers import run_values, write_corpus

import meshwright as mw
from meshwright import trainer
from meshwright.checkpoints import Checkpoint
from meshwright.data.loader import TrainData
from meshwright.data.prepare import prepare
from meshwright.data.store import is_store
from meshwright.engines.jax.engine import JaxEngine
from meshwright.errors import UserError
from meshwright.resuming import batch_sizes_of
from meshwright.track.console import PlainConsole


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("texts", "more")):
        write_corpus(tmp_path / name, seed=seed)


def make(**sections):
    return mw.make_run(run_values("texts", **sections))


def train(run) -> tuple[list[np.ndarray], str]:
    """The inputs of each step's batch, and what was shown."""
    batches = []

    class Recording(JaxEngine):
        def train_step(self, batch, stop=0):
            batches.append(batch.inputs_BT)
            return super().train_step(batch, stop)

    out = io.StringIO()
    trainer.train(run, Recording, PlainConsole(out))
    return batches, out.getvalue()


def records(name: str = "tiny") -> list[dict]:
    lines = Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "loss" in record]


def manifest_of(step: int) -> Path:
    return Path(f"runs/tiny/checkpoints/step_{step:08d}/manifest.json")


def test_another_batch_size_goes_on_from_the_next_unseen_example():
    first, _ = train(make(train={"steps": 5}))
    second, _ = train(make(train={"steps": 9, "batch_size": 6}))
    third, _ = train(make(train={"steps": 10}))
    assert json.loads(manifest_of(10).read_text())["batch_sizes"] == [[0, 4], [5, 6], [9, 4]]
    read = np.concatenate([*first, *second, *third])
    assert [len(batch) for batch in first + second + third] == [4] * 5 + [6] * 4 + [4]
    run = make(train={"batch_size": 48})
    data = TrainData(prepare(run), run)
    assert len(data._examples[0]) > 48  # all of it within an epoch
    assert np.array_equal(read, data.batch(0).inputs_BT)
    assert len(np.unique(read, axis=0)) == 48
    assert records()[-1]["epochs"] == pytest.approx(48 / len(data._examples[0]))


def test_a_checkpoint_made_before_sizes_could_change_tells_its_own():
    run = make(train={"batch_size": 8})
    old = {"step": 4, "identity": {"train.batch_size": 4}}
    assert batch_sizes_of(run, Checkpoint(Path(), old)) == [[0, 4], [4, 8]]
    assert batch_sizes_of(run, Checkpoint(Path(), {**old, "identity": {"train.batch_size": 8}})) == [[0, 8]]
    assert batch_sizes_of(run, None) == [[0, 8]]


def mixed(later: dict | None = None, packing: str = "packed", **sections):
    sources = [
        {"source": "texts", "weight": 0.75},
        {"source": "more", "weight": 0.25, "later": [later] if later else []},
    ]
    return make(data={"train": sources, "packing": packing}, schedule={"kind": "constant"}, **sections)


def test_a_mix_of_packed_sources_is_gone_on_with_exactly():
    later = {"step": 6, "weight": 3.0}
    whole, shown = train(mixed(later, name="whole", train={"eval_every": 6}))
    parts = [train(mixed(later, name="parts", train={"steps": steps}))[0] for steps in (5, 12)]
    assert np.array_equal(np.concatenate(whole), np.concatenate(parts[0] + parts[1]))
    losses = {name: {one["step"]: one["loss"] for one in records(name)} for name in ("whole", "parts")}
    assert losses["whole"] == losses["parts"]
    assert "  packing  packed, " in shown and "% of places are padding" in shown
    assert "texts, more: " in shown and "epochs" not in shown
    record = records("whole")[-1]
    tokens = [record[f"tokens/{name}"] for name in ("texts", "more")]
    assert sum(tokens) == pytest.approx(record["tokens"], rel=0.05)
    assert tokens[0] / sum(tokens) == pytest.approx((6 * 0.75 + 6 * 0.2) / 12, abs=0.03)
    assert 0 < record["epochs/more"] < record["epochs/texts"] + 1
    page = Path("runs/whole/report.html").read_text()
    assert "<h2>Sources</h2>" in page and "<td>texts</td>" in page and "epochs/" not in page.split("<h2>Run file")[0]


def test_weights_of_steps_to_come_may_change_and_others_may_not():
    train(mixed({"step": 6, "weight": 3.0}, train={"steps": 5}))
    with pytest.raises(
        UserError, match=r"shares of the sources before step 5\) = \[\[0, \[3, 1\]\], \[4, \[3, 8\]\]\]; the"
    ):
        train(mixed({"step": 4, "weight": 2.0}))
    train(mixed({"step": 8, "weight": 0.0}))
    assert [one["step"] for one in records()] == list(range(1, 13))


def test_what_documents_see_must_stay_the_same():
    train(make(data={"packing": "packed"}, train={"steps": 2}))
    with pytest.raises(UserError, match=r"data\.document_mask = False; the checkpoint was made with True"):
        train(make(data={"packing": "packed", "document_mask": False}))


@pytest.mark.parametrize("spec", ["**/*.txt", "**/*.jsonl", "."])
def test_what_runs_write_is_never_trained_on(spec):
    rows = [json.dumps({"text": text.read_text()}) for text in sorted(Path("texts").iterdir())]
    Path("more/rows.jsonl").write_text("\n".join(rows) + "\n")
    sampling = {"sample_every": 2, "sample_prompt": "the quick"}
    first, _ = train(make(data={"train": spec}, train={"steps": 4, **sampling}))
    assert Path("runs/tiny/log.txt").stat().st_size and Path("runs/tiny/samples.jsonl").stat().st_size
    second, shown = train(make(data={"train": spec}, train={"steps": 6, **sampling}))
    assert "resuming at step 4/6" in shown and len(second) == 2
    other, _ = train(make(data={"train": spec}, train={"steps": 6, **sampling}, name="other"))
    assert len(list(Path("stores").iterdir())) == 1
    for one, another in zip(first + second, other, strict=True):
        np.testing.assert_array_equal(one, another)


def test_outputs_named_outright_are_read_and_by_a_glob_are_none():
    train(make(train={"steps": 2}))
    assert prepare(make(data={"train": "runs/tiny/log.txt", "validation": 0.0})).train_tokens
    with pytest.raises(UserError, match=r"'runs/\*/log.txt': matches no file but those of runs and stores"):
        prepare(make(data={"train": "runs/*/log.txt"}))


def test_keys_that_a_store_cannot_follow_are_refused():
    store = prepare(make(data={"validation": 0.3})).stores[0].path
    assert prepare(make(data={"train": str(store), "validation": 0.3})).train_tokens
    assert prepare(make(data={"train": str(store), "validation": 0.01})).train_tokens  # the default: not asked for
    for asked, value in {"validation": "more", "normalize": "nfc", "deduplicate": True, "chat": "chatml"}.items():
        with pytest.raises(UserError, match=rf"data.{asked} = .*: the store .* was made with .*, and stays so"):
            prepare(make(data={"train": str(store), "validation": 0.3, asked: value}))
    with pytest.raises(UserError, match=r"data.validation = 0.2: the store .* was made with 0.3, and stays so"):
        prepare(make(data={"train": str(store)}))
    with pytest.raises(UserError, match=r"data.validation = .*: is a prepared store; name the text"):
        prepare(make(data={"validation": str(store)}))


def test_a_folder_of_text_may_have_a_manifest_of_its_own():
    assert not is_store("texts") and not is_store("x" * 400)
    Path("texts/manifest.json").write_text('{"manifest_version": 3, "name": "an extension"}')
    corpus = prepare(make(data={"validation": 0.0}))
    assert corpus.stores[0].manifest["made_from"]["source"]["files"] == 61
