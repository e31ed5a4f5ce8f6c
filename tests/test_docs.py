"""The docs are true: their commands run, their code has the effect it claims, their tables and links are current."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import write_corpus

import meshwright as mw
from meshwright.data.store import Store

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def load(path: Path):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


tour = load(ROOT / "benchmarks/readme_tour.py")
run_file_page = load(DOCS / "render_run_file.py")
performance_page = load(DOCS / "render_performance.py")
parity_page = load(DOCS / "render_parity.py")


def commands(page: str) -> list[str]:
    return [command for block in tour.blocks(page) for command in block.commands]


# README


def outside_make() -> dict[str, str]:
    """The environment without what a `make` that runs these tests hands down to another."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}


def test_the_demo_is_one_command():
    assert commands(README)[0] == "make demo"
    shown = subprocess.run(
        ["make", "-n", "demo"], cwd=ROOT, env=outside_make(), capture_output=True, text=True, check=True
    ).stdout
    assert shown.splitlines()[-1].endswith("/meshwright train examples/stdlib.toml")


@pytest.mark.parametrize("name", NAMES)
def test_every_make_target_exists(name):
    page = (ROOT / name).read_text(encoding="utf-8")
    for target in {*re.findall(r"`make ([a-z-]+)`", page), *re.findall(r"(?m)^make ([a-z-]+)$", page)}:
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, env=outside_make(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_readme_on_a_small_demo(tmp_path):
    """All commands but those that wait for a Ctrl-C, with a demo of the same name that takes a second."""
    tour.make_folder(tmp_path / "clone")
    write_corpus(tmp_path / "clone/texts")
    demo = tmp_path / "clone/examples/stdlib.toml"
    text = demo.read_text()
    for key, value in SMALL_DEMO.items():
        text, count = re.subn(rf"(?m)^{key} = .*", f"{key} = {value}", text)
        assert count == 1, f"examples/stdlib.toml has no {key}"
    demo.write_text(text.replace("[model]", "[model]\nlayers = 2\nwidth = 32\nheads = 2\nkv_heads = 2\nffn_width = 48"))
    short = re.sub(r"<!-- exit 124 -->\n```sh\n.*?```\n", "", README, flags=re.DOTALL)
    assert len(commands(short)) == len(commands(README)) - 2
    played = tour.play(short, tmp_path / "clone")
    outputs = {one.block.commands[0] if one.block.commands else "python": one.output for one in played}
    assert "step 20/20" in outputs["make demo"]
    assert "val_bits_per_byte" in outputs["meshwright eval runs/stdlib"]
    assert outputs["meshwright report runs/stdlib"] == "runs/stdlib/report.html\n"
    assert (tmp_path / "clone/runs/lion/metrics.jsonl").is_file()
    assert str(tmp_path) not in "".join(outputs.values())


SMALL_DEMO = {
    "train": '"texts"',
    "validation": "0.2",
    "vocab_size": "300",
    "warmup_steps": "2",
    "steps": "20",
    "batch_size": "4",
    "sequence_length": "32",
    "eval_every": "10",
    "sample_every": "0",
    "every": "10",
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_readme_in_full(tmp_path, monkeypatch):
    """Every command as it stands, in order, on the demo as it stands."""
    monkeypatch.delenv("XLA_FLAGS")  # its speed counts
    tour.make_folder(tmp_path / "clone")
    played = tour.play(README, tmp_path / "clone")
    run = mw.load_run(ROOT / "examples/stdlib.toml")
    assert f"step {run.train.steps}/{run.train.steps}" in played[0].output
    stopped, resumed = (one.output for one in played if one.block.exit_code == 124)
    step = re.search(r"stopped after step (\d+) and saved", stopped)[1]
    assert f"resuming at step {step}/20000" in resumed
    losses = [float(value) for value in re.findall(r"validation loss ([\d.]+)", played[0].output)]
    assert losses[-1] < losses[0]
    for output in (played[0].output, README):  # the aims: under 2 bits per byte, prepared and trained in 3 minutes
        final = re.search(r"  time +0:(\d\d):(\d\d)\n  validation +loss [\d.]+, ([\d.]+) bits per byte", output)
        assert float(final[3]) < 2.0
        assert f"steps       {run.train.steps:,}\n" in output
        if output is README:  # how fast the machine of a test is just now isn't known
            assert int(final[1]) * 60 + int(final[2]) < 180
    changed = tour.with_outputs(README, played)
    shown, now = ([block for block in tour.blocks(page) if block.kind == "text"] for page in (README, changed))
    for was, is_now in zip(shown, now, strict=True):
        assert [words(line) for line in steady(was.text)] == [words(line) for line in steady(is_now.text)]


def steady(output: str) -> list[str]:
    """The lines that say the same on every machine: those of a model's text, and of the machine, are left out."""
    kept = [line for line in output.splitlines() if re.match(r"  (run|steps|next|model|batch) |error: |val_", line)]
    return [line for line in kept if "runs/long" not in line and not line.startswith("  steps ")]


def words(line: str) -> str:
    return re.sub(r"\d+\.\d+", "#", line)


def test_readme_outputs_are_filled_in():
    outputs = [block for block in tour.blocks(README) if block.kind == "text"]
    assert len(outputs) >= 9
    for block in outputs:
        assert block.note.startswith("output") and block.text.strip()
    shown = "".join(block.text for block in outputs)
    assert "stopped after step" in shown and "resuming at step" in shown


def test_tour_fills_and_cuts_outputs():
    page = '```sh\na\nb\n```\nWords.\n\n<!-- output: first 1, then from "done" -->\n```text\nold\n```\nEnd.\n'
    (block, _) = tour.blocks(page)
    assert block.commands == ["a", "b"]
    output = "one\ntwo\ndone early\nthree\ndone\nlast\n"
    filled = tour.with_outputs(page, [tour.Played(block, output, 0)])
    assert filled == page.replace("old\n", "one\n…\ndone\nlast\n")
    assert tour.with_outputs(filled, [tour.Played(block, output, 0)]) == filled


def test_tour_notices_a_command_that_fails(tmp_path):
    tour.make_folder(tmp_path / "clone")
    with pytest.raises(RuntimeError, match="'false' ended with 1, not 0"):
        tour.play("```sh\nfalse\ntrue\n```\n", tmp_path / "clone")
    with pytest.raises(RuntimeError, match="ended with 0, not 1"):
        tour.play("<!-- exit 1 -->\n```sh\ntrue\n```\n", tmp_path / "clone")


# The run file


def test_run_file_page_is_current():
    page = run_file_page.PAGE.read_text(encoding="utf-8")
    assert run_file_page.render(page) == page, "run: python docs/render_run_file.py"


def test_performance_page_is_current():
    page = performance_page.PAGE.read_text(encoding="utf-8")
    assert performance_page.render(page) == page, "run: python docs/render_performance.py"


def test_parity_page_is_current_and_within_the_tolerances():
    import json

    page = parity_page.PAGE.read_text(encoding="utf-8")
    assert parity_page.render(page) == page, "run: python docs/render_parity.py"
    rows = json.loads((ROOT / "benchmarks/results/parity.json").read_text())["rows"]
    assert len(rows) > 200
    for row in rows:
        assert row["loss"] < 1e-5 and row["gradient"] < 1e-4 and row["param"] < 1e-4, row


def test_performance_page_holds_what_was_aimed_at():
    """The aims of the project's CPU benchmarks, read off the recorded results."""
    import json

    results = {path.stem: json.loads(path.read_text()) for path in (ROOT / "benchmarks/results").glob("*.json")}
    assert all(shape["ratio"] >= 1.5 for shape in results["cpu_train"]["shapes"].values())
    assert all(size["ratio"] >= 0.8 for size in results["prepare"]["encode"])
    ways = results["prepare"]["beside_nanogpt"]
    assert ways["ratio"] >= 1.5 and ways["disk_share"] <= 0.25
    assert ways["prepare"]["peak_mb"] <= 1.25 * ways["prepare_peak_mb_of_a_tenth"]
    assert all(run["idle_share"] < 0.01 for run in results["loader"]["training"].values())
    assert results["host_overhead"]["host_s"] < 1e-3
    assert results["start"]["commands"]["meshwright --help"]["median_s"] < 0.3


def test_run_file_tables_hold_every_key():
    from meshwright.config import MixedSource, Run, WeightFrom

    rows = {
        f"{section}.{row['name']}" if section else row["name"]: row
        for section, rows in run_file_page.keys().items()
        for row in rows
    }
    run = mw.make_run({"name": "a", "data": {"train": "b"}, "model": {"preset": "gpt2"}}).model_dump()
    expected = set()
    for name in Run.model_fields:
        expected |= {f"{name}.{key}" for key in run[name]} if isinstance(run[name], dict) else {name}
    expected |= {f"[data.train].{key}" for key in MixedSource.model_fields}
    expected |= {f"[data.train.later].{key}" for key in WeightFrom.model_fields}
    assert rows.keys() == expected
    assert rows["[data.train].field"]["meaning"] == rows["data.field"]["meaning"]
    assert rows["[data.train].include"] | {"meaning": ""} == {
        "name": "include",
        "type": "list of strings",
        "default": "as in `[data]`",
        "meaning": "",
    }
    assert rows["data.train"]["type"] == "string or list of tables"
    assert rows["train.steps"] == {**rows["train.steps"], "type": "integer > 0", "default": "`1000`"}
    assert rows["data.train"]["default"] == "(must be given)"
    assert rows["model.layers"]["default"] == "the preset's"
    assert rows["checkpoint.keep"]["meaning"].startswith("The newest ones")  # the docstring of config.py


def test_shown_mistakes_are_real(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (DOCS / "run-file.md").read_text(encoding="utf-8")
    Path("poems.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    assert mw.load_run("poems.toml").name == "poems"
    part = page.split("## What a mistake looks like")[1].split("\n## ")[0]
    mistakes = re.findall(r"(?m)^\| `(.+?)` \| `(.+)` \|$", part)
    assert len(mistakes) >= 6
    for override, answer in mistakes:
        with pytest.raises(mw.UserError) as caught:
            mw.load_run("poems.toml", [override])
        assert str(caught.value) == answer
    example = next(line for line in page.splitlines() if line.startswith("meshwright train poems.toml "))
    overrides = example.split()[3:]
    assert len(overrides) == 4
    assert mw.load_run("poems.toml", overrides).optimizer.kind == "lion"
    for code in python_blocks(page):
        exec(compile(code, "run-file.md", "exec"), {})


# Extending


def python_blocks(page: str) -> list[str]:
    return [block.text for block in tour.blocks(page) if block.kind == "python"]


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """What the examples of extending.md leave behind: their names, and their folder."""
    folder, before = tmp_path_factory.mktemp("extending"), Path.cwd()
    names: dict = {}
    os.chdir(folder)
    try:
        for code in python_blocks((DOCS / "extending.md").read_text(encoding="utf-8")):
            exec(compile(code, "extending.md", "exec"), names)
        yield names, folder
    finally:
        os.chdir(before)


def losses(folder: Path, name: str) -> dict[int, float]:
    return {step: record["loss"] for step, record in records(folder, name).items()}


def records(folder: Path, name: str) -> dict[int, dict]:
    lines = (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines) if "loss" in line}


def test_own_source_is_what_was_trained_on(extended):
    names, folder = extended
    store = Store.open(folder / names["store"].path)
    texts = set()
    for split in (store.split("train"), store.split("validation")):
        texts |= {store.tokenizer().decode(split.document(i)) for i in range(split.document_count)}
    assert texts == {row[0] for row in names["rows"]}
    assert store.manifest["made_from"]["source"]["name"] == "notes.db"
    trained = mw.open_run(folder / "runs/notes")
    assert trained.run.data.train == str(names["store"].path)
    assert trained.evaluate()["val_loss"] == pytest.approx(names["notes"].evaluation["val_loss"], rel=1e-6)
    fingerprint = names["Notes"]("notes.db").describe()["fingerprint"]
    with names["sqlite3"].connect("notes.db") as database:
        database.execute("insert into notes (text) values ('one more')")
    assert names["Notes"]("notes.db").describe()["fingerprint"] != fingerprint


def test_own_model_is_what_was_trained(extended):
    import jax.numpy as jnp
    from flax import nnx

    from meshwright.models.decoder import Decoder

    names, folder = extended
    assert losses(folder, "parallel") != losses(folder, "plain")
    trained = mw.open_run(folder / "runs/parallel", model=names["ParallelDecoder"])
    assert trained.evaluate()["val_loss"] == pytest.approx(names["parallel"].evaluation["val_loss"], rel=1e-6)
    # The same parameters in the built-in decoder are another function, so the claim above isn't empty.
    disguised = type("ParallelDecoder", (Decoder,), {})
    built_in = mw.open_run(folder / "runs/parallel", model=disguised).evaluate()["val_loss"]
    assert abs(built_in - names["parallel"].evaluation["val_loss"]) > 1e-4
    assert names["text"][0] == trained.generate("3 times ", max_tokens=20)[0]

    spec = trained.run.model.spec.model_copy(update={"layers": 1})
    x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(1, 4, spec.width)), jnp.float32)
    block = names["ParallelBlock"](spec, rngs=nnx.Rngs(0))
    from meshwright.models.attention import Places, rotary_angles

    positions_BT = jnp.arange(4)[None]
    places = Places(positions_BT, jnp.arange(4), rotary_angles(positions_BT, spec.head_width, spec.rope_theta))
    got, _, _ = block(x_BTD, places)
    attended, _ = block.attention(block.attention_norm(x_BTD), places)
    np.testing.assert_allclose(got, x_BTD + attended + block.mlp(block.mlp_norm(x_BTD)), rtol=1e-6, atol=1e-6)
    sequential, _, _ = names["Block"].__call__(block, x_BTD, places)
    assert jnp.abs(got - sequential).max() > 1e-5


def test_own_optimizer_is_what_trained(extended):
    names, folder = extended
    plain, sgd = losses(folder, "plain"), losses(folder, "sgd")
    assert sgd[1] == plain[1]  # the same start, batch and loss
    assert sgd[20] < plain[20] - 0.5  # another way from there
    saved = json.dumps(json.loads((folder / "runs/sgd/checkpoints/step_00000020/state/_METADATA").read_text()))
    assert "trace" in saved and ".mu." not in saved  # SGD's momentum, not AdamW's two means
    # It is gone on with, as promised, when it is given again.
    run, optax = names["run"], names["optax"]
    longer = run.model_copy(update={"train": run.train.model_copy(update={"steps": 22, "eval_every": 0})})
    assert mw.train(longer, optimizer=optax.sgd(optax.constant_schedule(0.0), momentum=0.9)).step == 22
    assert losses(folder, "sgd")[21] == pytest.approx(losses(folder, "sgd")[20], abs=0.3)


def test_own_metrics_are_logged_and_only_look_on(extended):
    _, folder = extended
    assert losses(folder, "measured") == losses(folder, "plain")
    measured, plain = records(folder, "measured"), records(folder, "plain")
    for step, record in measured.items():
        assert record.keys() - plain[step].keys() == {"update_share", "first_block_grad"}
        assert 0 < record["update_share"] < 0.1
        assert 0 < record["first_block_grad"] < record["grad_norm"]
    assert "update_share" in (folder / "runs/measured/report.html").read_text()


def test_own_console_hears_every_record(extended):
    names, folder = extended
    assert names["listening"].losses == losses(folder, "heard")
    assert len(names["listening"].losses) >= 3


def test_a_run_of_an_own_optimizer_opens_and_logs_no_learning_rate(extended):
    names, folder = extended
    trained = mw.open_run(folder / "runs/sgd")
    assert trained.evaluate()["val_loss"] == pytest.approx(names["sgd"].evaluation["val_loss"], rel=1e-6)
    assert "learning_rate" not in records(folder, "sgd")[1]
    assert "learning_rate" in records(folder, "plain")[1]


# The tutorial


@pytest.mark.slow
def test_tutorial(tmp_path, monkeypatch):
    import jupytext

    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in jupytext.read(DOCS / "tutorial.md").cells if cell.cell_type == "code"]
    assert len(cells) > 12
    names: dict = {}
    shown = [run_cell(cell.source, names) for cell in cells]
    assert shown[-1].tolist() == [True]  # whole and parts are equal to the last bit
    whole, parts = names["whole"], names["parts"]
    assert len(parts["step"]) > len(whole["step"])  # and were trained in different pieces
    assert names["outcome"].step == 120
    assert names["bits"].keys() == {"adamw", "muon"} and names["bits"]["adamw"] != names["bits"]["muon"]
    steps = mw.open_run("runs/library").metrics()["step"].tolist()
    assert steps == sorted(steps) and steps[-1] == 150
    assert Path("runs/library/report.html").is_file()
    assert len(list(Path("stores").iterdir())) == 1


def run_cell(source: str, names: dict):
    """Run a cell as a notebook does; returns the value of its last line."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "tutorial.md", "exec"), names)
    return eval(compile(ast.Expression(last.value), "tutorial.md", "eval"), names) if last else None


# All pages


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), f"{name}: {target}"
        assert ROOT.resolve() in there.parents
        assert not anchor or anchor in anchors(there), f"{name}: {target}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"(?m)^#+ (.+)$", without_code(page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def without_code(text: str) -> str:
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def test_every_page_can_be_found():
    linked = set(re.findall(r"\]\(([\w./-]+\.md)", (DOCS / "index.md").read_text(encoding="utf-8")))
    found = {(DOCS / target).resolve() for target in linked}
    assert found == {page.resolve() for page in PAGES} - {(DOCS / "index.md").resolve()}


@pytest.mark.parametrize("name", NAMES)
def test_says_nothing_it_should_not(name):
    """No local paths or addresses, no praise, and shell blocks without prompts, so that they can be pasted."""
    text = (ROOT / name).read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.~])/(?:home|root|tmp|work|Users|opt|usr|var|mnt)/\S*", text)
    assert not re.findall(r"(?i)localhost|127\.0\.0\.1|https?://\S*(?:index|simple|registry|mirror)\S*", text)
    praise = r"blazing|seamless|cutting.edge|world.class|state.of.the.art|revolution|game.chang|effortless|powerful"
    assert not re.findall(rf"(?i)\b(?:{praise})\w*", text)
    for command in commands(text):
        assert command and not command.startswith(("$", "#", ">")), command
    for number, line in enumerate(without_code(text).splitlines(), 1):
        assert len(line) <= 120 or line.startswith("|"), f"{name}:{number}"


def test_promises_of_the_readme_name_what_is_missing():
    stands = README.split("## What stands today")[1].split("\n## ")[0]
    for missing in ("W&B", "MLflow"):
        assert re.search(rf"{missing}[^.]* planned", stands), missing


def test_all_that_is_public_is_on_the_page_for_python():
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    assert [name for name in mw.__all__ if f"mw.{name}" not in page] == []
    methods = [name for name in vars(mw.TrainedRun) if not name.startswith("_") and name != "engine"]
    assert [name for name in methods if f"`{name}" not in page] == []
