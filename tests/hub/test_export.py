"""A real checkpoint trained from, exported and proven; and exports that aren't the run's model, caught."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from glass import glass_tensors, write_glass
from helpers import virtual_devices
from runs import still_run
from safetensors.numpy import load_file

import meshwright as mw
from meshwright.cli import main
from meshwright.data.prepare import prepare
from meshwright.errors import UserError
from meshwright.hub import proof
from meshwright.hub.generation import keep_generation
from meshwright.hub.reader import open_checkpoint
from meshwright.models import llama


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that started from the checkpoint, which is gone since; and how it ended."""
    folder = tmp_path_factory.mktemp("trained")
    glass = write_glass(folder / "glass")
    outcome = mw.train(still_run(folder, "still", f"hf:{glass}"))
    shutil.rmtree(glass)
    return outcome


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(proof, "transformers_version", lambda: "")


def export(trained, out, *options):
    """The command's exit code."""
    with pytest.raises(SystemExit) as end:
        main(["export", str(trained.run_dir), str(out), *options], prog_name="meshwright")
    return end.value.code


def test_a_real_checkpoint_speaks_english(trained):
    assert trained.evaluation["val_loss"] < math.log(1024) - 1.5  # a random one knows nothing: the logarithm
    assert "hf:" in mw.open_run(trained.run_dir).run.model.init  # which opens, though the checkpoint is gone


def test_what_came_in_goes_out(trained, tmp_path, without_transformers, capsys):
    assert export(trained, tmp_path / "out") == 0
    theirs = load_file(tmp_path / "out" / "model.safetensors")
    expected = glass_tensors()
    assert theirs.keys() == expected.keys()
    for name, values in theirs.items():
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, expected[name].astype(np.float32))
    shown = capsys.readouterr().out
    assert "38 tensors read again from disk" in shown
    assert "largest difference of logits 0.0e+00 over 256 tokens" in shown
    assert "not compared with transformers" in shown
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["dtype"]) == ("llama", 3, "float32")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["eos_token_id"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_the_card_says_what_is_known_and_leaves_the_rest_to_its_maker(trained, tmp_path, without_transformers):
    mw.open_run(trained.run_dir).export(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    manifest = json.loads((trained.run_dir / "checkpoints" / "step_00000002" / "manifest.json").read_text())
    assert manifest["identity"]["data (fingerprint)"] in card
    assert f"{trained.evaluation['val_loss']:.4f}" in card
    assert "852,608" in card and "2 steps, 256 tokens" in card
    assert "To be stated by you" in card and "\nlicense:" not in card
    assert "not compared with transformers" in card
    run_file = card.split("```toml\n")[1].split("```")[0]
    (tmp_path / "run.toml").write_text(run_file)
    assert mw.load_run(tmp_path / "run.toml") == mw.open_run(trained.run_dir).run


def test_shards_and_transformers(trained, tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    done = mw.open_run(trained.run_dir).export(tmp_path / "out", shard_bytes=1_000_000)
    shards = [name for name in done.files if name.endswith(".safetensors")]
    assert len(shards) > 3
    assert all((done.path / name).stat().st_size < 1_010_000 for name in shards)
    index = json.loads((done.path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert index["metadata"]["total_size"] == 852_608 * 4
    assert set(open_checkpoint(f"hf:{done.path}").names) == glass_tensors().keys()
    assert [line for line in done.proof if f"transformers {transformers.__version__}: largest difference" in line]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(done.path)
    assert loaded.generation_config.eos_token_id == 3


def test_all_ends_of_text_and_how_tokens_are_chosen_stay(trained, tmp_path, without_transformers):
    shutil.copytree(trained.run_dir, tmp_path / "run")
    opened = mw.open_run(tmp_path / "run")
    text = opened.generate("It was", max_tokens=12, temperature=0.0)[0]
    ids = opened.tokenizer.encode(f"It was{text}")
    end = ids[len(opened.tokenizer.encode("It was")) + 3]
    glass = write_glass(tmp_path / "glass")
    (glass / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, end], "temperature": 0.6}))
    keep_generation(still_run(tmp_path, "other", f"hf:{glass}"), tmp_path / "run")
    shutil.rmtree(glass)
    opened.export(tmp_path / "out")
    config, said = (json.loads((tmp_path / "out" / f"{n}.json").read_text()) for n in ("config", "generation_config"))
    assert config["eos_token_id"] == said["eos_token_id"] == [3, end]
    assert said["temperature"] == 0.6
    shorter = opened.generate("It was", max_tokens=12, temperature=0.0)[0]
    assert text.startswith(shorter) and shorter != text


def test_a_beginning_of_text_where_it_is_asked_for(tmp_path, without_transformers, monkeypatch):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    glass = write_glass(tmp_path / "glass")
    theirs = Tokenizer.from_file(str(glass / "tokenizer.json"))
    theirs.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    theirs.save(str(glass / "tokenizer.json"))
    opened, logs = {}, {}
    for name, section in {"begun": {"add_bos": True}, "plain": {}}.items():
        outcome = mw.train(still_run(tmp_path, name, f"hf:{glass}", tokenizer=section))
        opened[name], logs[name] = mw.open_run(outcome.run_dir), (outcome.run_dir / "log.txt").read_text()
    assert "set tokenizer.add_bos = true" in logs["plain"] and "add_bos" not in logs["begun"]
    prompts = []
    for run in opened.values():
        monkeypatch.setattr(run.engine, "generate", lambda ids, *_: prompts.append(ids[0]) or iter([]))
        run.generate("It was")
    assert prompts[0] == [2, *prompts[1]] == theirs.encode("It was").ids
    stores = [prepare(run.run).stores[0].split("train") for run in opened.values()]
    begun, plain = (store.document(0).tolist() for store in stores)
    assert begun == [2, *plain]
    assert opened["begun"].evaluate()["val_loss"] != pytest.approx(opened["plain"].evaluate()["val_loss"], rel=1e-4)
    opened["begun"].export(tmp_path / "out")
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode("It was").ids == prompts[0]


def test_here_and_through_a_link(trained, tmp_path, without_transformers, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    opened = mw.open_run(trained.run_dir.absolute())
    monkeypatch.chdir(tmp_path / "here")
    for out, folder in ((".", "here"), (tmp_path / "link", "there")):
        assert str(opened.export(out).path) == str(out)
        assert (tmp_path / folder / "model.safetensors").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"here", "there", "link"}


def test_where_a_file_system_is_mounted_nothing_is_written(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "out")
    with pytest.raises(UserError, match="is where a file system is mounted; name a folder in it"):
        mw.open_run(trained.run_dir).export(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_bfloat16(trained, tmp_path):
    done = mw.open_run(trained.run_dir).export(tmp_path / "out", dtype="bfloat16")
    assert 852_608 * 2 < (done.path / "model.safetensors").stat().st_size < 852_608 * 2 + 20_000
    assert any("read again: largest difference" in line for line in done.proof)


def test_nothing_is_overwritten(trained, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    assert export(trained, tmp_path / "out") == 1
    assert "nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine.txt"]


def interleaved(x):
    """Rows of q or k in another order: heads of 32, pairs where halves belong."""
    rows, fan_in = x.shape
    return np.ascontiguousarray(x.reshape(-1, 2, 16, fan_in).swapaxes(1, 2).reshape(rows, fan_in))


def halved(x):
    """Undoes `interleaved`."""
    rows, fan_in = x.shape
    return np.ascontiguousarray(x.reshape(-1, 16, 2, fan_in).swapaxes(1, 2).reshape(rows, fan_in))


def plant(monkeypatch, *, both_ways):
    """Have the rules of q and k permute rows wrongly."""
    right = llama.weights

    def wrong(spec):
        def change(rule):
            if not rule.ours.endswith(("query.kernel", "key.kernel")):
                return rule
            rule = rule._replace(to_theirs=lambda x, undone=rule.to_theirs: interleaved(undone(x)))
            return rule._replace(to_ours=lambda x, made=rule.to_ours: made(halved(x))) if both_ways else rule

        return [change(rule) for rule in right(spec)]

    monkeypatch.setattr(llama, "weights", wrong)


def failed(trained, folder, capsys):
    assert export(trained, folder / "out") == 1
    error = capsys.readouterr().err
    assert "not exported, since what was written is not the run's model" in error
    assert not (folder / "out").exists()
    assert "differ by up to" in (folder / "out.failed" / "FAILED.txt").read_text()
    return error


def test_a_fault_on_the_way_out_is_caught_by_reading_again(
    trained, tmp_path, monkeypatch, without_transformers, capsys
):
    plant(monkeypatch, both_ways=False)
    assert "read again differ" in failed(trained, tmp_path, capsys)
    assert export(trained, tmp_path / "out") == 1
    assert (tmp_path / "out.failed-2").is_dir()


def test_a_fault_that_reading_again_undoes_is_caught_by_transformers(trained, tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    plant(monkeypatch, both_ways=True)
    error = failed(trained, tmp_path, capsys)
    assert "transformers" in error and "read again differ" not in error


def test_a_tensor_that_disk_holds_otherwise_is_caught(trained, tmp_path, monkeypatch, without_transformers, capsys):
    from meshwright.hub import export as exporting

    right = exporting.write_file

    def damaged(path, *more):
        right(path, *more)
        with open(path, "r+b") as file:
            file.seek(-3, 2)
            file.write(b"\x3f")

    monkeypatch.setattr(exporting, "write_file", damaged)
    assert export(trained, tmp_path / "out") == 1
    assert "isn't what was written" in capsys.readouterr().err


MESHED = """
import sys
from pathlib import Path
import meshwright as mw
from meshwright.hub import proof
from runs import still_run
proof.transformers_version = lambda: ""
folder, glass = Path(sys.argv[1]), sys.argv[2]
mesh = {"pipeline": 2, "pipeline_rounds": 2, "fsdp": 2, "data": 2}
train = {"batch_size": 8, "micro_batch_size": 4, "steps": 1, "eval_every": 0}
outcome = mw.train(still_run(folder, "meshed", f"hf:{glass}", mesh=mesh, train=train))
print(*mw.open_run(outcome.run_dir).export(folder / "out").proof, sep="\\n")
"""


def test_from_a_checkpoint_over_a_mesh_to_a_checkpoint(glass, tmp_path):
    """Layers lie in another order in a circular pipeline, cut along three axes; they come out as they went in."""
    path = os.pathsep.join([*sys.path[:2], str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", MESHED, tmp_path, glass],
        env={**os.environ, **virtual_devices(8), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "read again: largest difference" in done.stdout
    for name, values in load_file(tmp_path / "out" / "model.safetensors").items():
        np.testing.assert_array_equal(values, glass_tensors()[name].astype(np.float32))
