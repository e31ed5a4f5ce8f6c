import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import meshwright, run_values, write_corpus, write_run

from meshwright import doctor
from meshwright.api import plan
from meshwright.cli import main
from meshwright.config import load_run
from meshwright.launch import devices

COMMANDS = ["prepare", "plan", "train", "eval", "generate", "export", "report", "doctor"]
FRAMEWORKS = ("jax", "flax", "optax", "orbax", "grain", "torch", "ray", "transformers", "matplotlib", "tiktoken")


@pytest.fixture
def here(tmp_path):
    write_corpus(tmp_path / "texts")
    write_run(tmp_path / "run.toml", run_values("texts", train={"eval_every": 6}))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command, tmp_path):
    done = meshwright(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "Example:" in done.stdout
    assert f"  meshwright {command}" in done.stdout.split("Example:")[1]


def imported_by(*arguments, cwd):
    """The frameworks that a command has imported by the time it ends."""
    code = f"""
import sys
from meshwright.cli import main
try:
    main({list(arguments)!r}, prog_name="meshwright")
except SystemExit as end:
    assert not end.code, end.code
print("IMPORTED", *[name for name in {FRAMEWORKS!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_each_command_imports_what_it_needs_alone(here):
    assert imported_by("--help", cwd=here) == set()
    assert imported_by("train", "--help", cwd=here) == set()
    assert imported_by("prepare", "run.toml", cwd=here) == set()
    assert "jax" in imported_by("train", "run.toml", cwd=here)
    assert imported_by("report", "runs/tiny", cwd=here) == set()
    assert not {"torch", "ray", "transformers", "matplotlib"} & imported_by("eval", "runs/tiny", cwd=here)


def test_importing_the_package_imports_no_framework():
    code = f"import sys, meshwright as mw; mw.load_run; print([n for n in {FRAMEWORKS!r} if n in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_whole_way_on_a_pipe(here):
    done = meshwright("prepare", "run.toml", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "next: meshwright train run.toml" in done.stdout
    done = meshwright("train", "run.toml", "train.steps=6", cwd=here)
    assert done.returncode == 0, done.stderr
    assert "step 6/6" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    done = meshwright("eval", "runs/tiny", "--checkpoint", "best", cwd=here)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "step",
        "val_loss",
        "val_perplexity",
        "val_bits_per_byte",
    ]
    one = meshwright("generate", "runs/tiny", "--prompt", "the ", "--max-tokens", "9", "--seed", "3", cwd=here)
    assert one.returncode == 0, one.stderr
    assert one.stdout.startswith("the ") and len(one.stdout) > 5
    again = meshwright("generate", "runs/tiny", "--prompt", "the ", "--max-tokens", "9", "--seed", "3", cwd=here)
    assert again.stdout == one.stdout
    two = meshwright("generate", "runs/tiny", "--prompt", "the ", "--prompt", "a", "--max-tokens", "9", cwd=here)
    assert two.stdout.count("---") == 4
    done = meshwright("report", "runs/tiny", cwd=here)
    assert done.stdout.strip() == "runs/tiny/report.html"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "none.toml"], "error: none.toml: no such run file; see examples/ for some to start from"),
        (["train", "run.toml", "train.stesp=3"], "error: run.toml: train.stesp: unknown key; did you mean 'steps'?"),
        (["train", "run.toml", "data.train=nowhere/*.txt"], "error: data.train = 'nowhere/*.txt': "),
        (
            ["train", "run.toml", "train.sequence_length=64", "data.train=one.txt", "data.validation=0"],
            "error: train.sequence_length = 64: longer than the store's train split",
        ),
        (["train", "run.toml", "model=gpt2"], "error: run.toml: model = 'gpt2': must be a section, [model]"),
        (["train", "run.toml", "data.train=run.toml/x"], "error: data.train = 'run.toml/x': "),
        (["train", "run.toml/x"], "error: run.toml/x: can't be read: Not a directory"),
        (["train", "run.toml", "run_dir=run.toml/x"], "error: run_dir = 'run.toml/x': can't be written to"),
        (["train", "run.toml", "seed=3000000000"], "error: run.toml: seed = 3000000000: must be less than 2147483648"),
        (["train", "run.toml", "optimizer.learning_rate=inf"], "error: run.toml: optimizer.learning_rate = inf: "),
        (
            ["train", "run.toml", "schedule.kind=wsd", "schedule.decay_steps=13"],
            "error: run.toml: schedule.decay_steps",
        ),
        (
            ["train", "run.toml", "train.sample_every=2", f"train.sample_prompt={'long ' * 9}"],
            "error: train.sample_prompt = 'long ",
        ),
        (["eval", "texts"], "error: texts: not a run directory (no run.toml in it); give the folder that train wrote"),
        (["report", "texts"], "error: texts"),
        (["generate", "nowhere"], "error: nowhere: not a run directory"),
    ],
)
def test_a_mistake_is_a_line_and_exit_code_1(arguments, expected, here):
    (here / "one.txt").write_text("tiny")
    done = meshwright(*arguments, cwd=here)
    assert done.returncode == 1
    assert done.stderr.startswith(expected), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor(tmp_path):
    done = meshwright("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("python", "packages", "devices", "memory", "disk"):
        assert f"ok    {name}" in done.stdout
    done = meshwright("doctor", cwd=tmp_path, JAX_PLATFORMS="nonsense")
    assert done.returncode == 1
    assert "FAIL  devices" in done.stdout
    assert "Traceback" not in done.stderr


def test_examples_in_help_are_commands(monkeypatch):
    monkeypatch.chdir(Path(__file__).parent.parent)
    for name, command in main.commands.items():
        (example,) = re.findall(rf"Example:\n +meshwright {name} ?(.*)", command.help)
        given = command.make_context(name, shlex.split(example)).params
        if "run_file" in given:
            run = load_run(given["run_file"], given["overrides"])
        if name == "plan":
            assert plan(run, devices=given["devices"], compiled=False).devices == 8


def test_an_idle_card_is_told(monkeypatch, tmp_path):
    card = tmp_path / "version"
    monkeypatch.setattr(devices, "_NVIDIA", card)
    monkeypatch.setattr(devices, "on_cpu", lambda: True)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert devices.idle_card() == ""
    card.write_text("NVRM version")
    assert "an NVIDIA card is here, but JAX has the CPU alone; pip install" in devices.idle_card()
    found = {finding.name: finding for finding in doctor.examine()}["devices"]
    assert not found.good and found.text == devices.idle_card()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # asked for
    assert devices.idle_card() == ""
