import re
import tomllib
from pathlib import Path

import pytest
from helpers import run_values

from meshwright.config import Run, load_run, make_run
from meshwright.config_data import MixedSource, WeightFrom
from meshwright.errors import UserError

ROOT = Path(__file__).parent.parent

MISTAKES = [
    ({"model": {"preset": "gpt2-tin"}}, r"model\.preset = 'gpt2-tin': no such preset; did you mean 'gpt2-tiny'"),
    ({"model": {"heads": 5}}, r"model\.heads = 5 must divide width = 32; set heads to one of \[1, 2, 4, 8, 16, 32\]"),
    (
        {"model": {"heads": 4, "kv_heads": 3}},
        r"model\.kv_heads = 3 must divide heads = 4; set it to one of \[1, 2, 4\]",
    ),
    ({"model": {"hedas": 4}}, r"model\.hedas: unknown key; did you mean 'heads'"),
    ({"train": {"batchsize": 4}}, r"train\.batchsize: unknown key; did you mean 'batch_size'"),
    ({"trian": {"steps": 4}}, r"trian: unknown key; did you mean 'train'"),
    ({"train": {"batch_size": "8"}}, r"train\.batch_size = '8': must be a valid integer"),
    (
        {"train": {"batch_size": 8, "micro_batch_size": 3}},
        r"batch_size = 8 must be a multiple of .* = 3; set .*\[1, 2, 4, 8\]",
    ),
    ({"train": {"sequence_length": 4096}}, r"sequence_length = 4096 must not exceed model\.context_length = 64"),
    ({"optimizer": {"learning_rate": -1.0}}, r"optimizer\.learning_rate = -1\.0: must be greater than 0"),
    ({"optimizer": {"kind": "adam"}}, r"optimizer\.kind = 'adam': must be 'adamw', 'lion', 'muon' or 'schedule_free'"),
    ({"schedule": {"warmup_steps": 13}}, r"warmup_steps = 13 must not exceed train\.steps = 12"),
    (
        {"data": {"validation": 1.5}},
        r"data\.validation = 1\.5: must be a share .* less than 1, or the name of a source",
    ),
    ({"data": {"validation": True}}, r"data\.validation = True: must be a share .*, or the name of a source"),
    (
        {"data": {"train": [{"source": "a", "wieght": 2}]}},
        r"data\.train\.0\.wieght: unknown key; did you mean 'weight'\?",
    ),
    (
        {"data": {"train": [{"source": "a", "later": [{"step": 3, "wait": 1.0, "weight": 1.0}]}]}},
        r"data\.train\.0\.later\.0\.wait: unknown key; did you mean 'weight'\?",
    ),
    ({"data": {"train": [{"source": "a", "weight": -1}]}}, r"data\.train\.0\.weight = -1: must be greater than or"),
    ({"data": {"train": [{"weight": 1}]}}, r"data\.train\.0\.source: missing"),
    ({"data": {"train": []}}, r"data\.train = \[\]: must"),
    ({"data": {"train": 3}}, r"data\.train = 3: must be a valid string"),
    ({"engine": "tensorflow"}, r"engine = 'tensorflow': must be 'jax' or 'torch'"),
    ({"mesh": {"tensr": 2}}, r"mesh\.tensr: unknown key; did you mean 'tensor'\?"),
    ({"mesh": {"fsdp": 0}}, r"mesh\.fsdp = 0: must be a positive number, or -1 for all devices that are left"),
    ({"mesh": {"fsdp": -1}}, r"mesh\.fsdp = -1: only one size may be -1, and mesh\.data is; give it a number"),
    ({"mesh": {"pipeline_rounds": 2}}, r"mesh\.pipeline_rounds = 2: needs mesh\.pipeline of 2 or more"),
    ({"launch": {"workers": 2}}, r"launch\.workers = 2: needs launch\.kind = \"processes\" or \"ray\""),
    ({"launch": {"workers": -1}}, r"launch\.workers = -1: must be greater than or equal to 0"),
    (
        {"launch": {"kind": "ray", "workers": [3, 2]}},
        r"launch\.workers = \[3, 2\]: must be \[fewest, most\], from 1 on",
    ),
    ({"launch": {"kind": "ray", "workers": [1]}}, r"launch\.workers = \[1\]: must"),
    ({"launch": {"kind": "processes", "workers": [1, 2]}}, r"launch\.workers = \[1, 2\]: needs launch\.kind = \"ray\""),
    ({"launch": {"coordinator": "a:1"}}, r"launch\.coordinator = 'a:1': needs launch\.kind = \"processes\""),
    ({"launch": {"kind": "processes", "coordinator": "a"}}, r"launch\.coordinator = 'a': must be host:port"),
    ({"launch": {"kind": "processes", "coordinator": "fd00::1:7"}}, r"must be host:port, as .* or \[fd00::1\]:7777"),
    (
        {"launch": {"kind": "processes", "workers": 2, "coordinator": "a:1", "index": 2}},
        r"launch\.index = 2: must be less than launch\.workers = 2; count from 0",
    ),
    (
        {"tokenizer": {"kind": "bytes", "add_bos": True}},
        r'tokenizer\.add_bos = true: is of kind "hf:…"; bytes has no beginning of text: leave it out',
    ),
    ({"launch": {"topology": "4x4"}}, r"launch\.topology = '4x4': needs launch\.kind = \"ray\""),
    ({"launch": {"kind": "ray", "topology": "4"}}, r"launch\.topology = '4': must be the shape of a TPU slice"),
    ({"launch": {"kind": "ray", "topology": "4x4"}}, r"launch\.topology = '4x4': needs launch\.accelerator"),
    ({"launch": {"kind": "ray", "start_timeout": 0.0}}, r"launch\.start_timeout = 0\.0: must be greater than 0"),
    (
        {"train": {"float8": True, "compute_dtype": "float32"}},
        r"train\.float8 = true: needs activations in bfloat16, and .* is \"float32\"; set that to",
    ),
    (
        {"optimizer": {"matrix_learning_rate": 0.01}},
        r'optimizer\.matrix_learning_rate = 0\.01: is of kind = "muon", and kind = "adamw"; leave it out',
    ),
    ({"schedule": {"decay_steps": 5}}, r'schedule\.decay_steps = 5: is of kind = "wsd", and kind = "cosine"; leave'),
    ({"train": {"remat": "some"}}, r"train\.remat = 'some': must be 'none', 'full' or 'products'"),
    (
        {"model": {"preset": "llama-tiny", "shared_experts": 2}},
        r"model\.shared_experts = 2 needs experts > 0; set experts, or shared_experts = 0",
    ),
    (
        {"model": {"preset": "llama-tiny", "capacity_factor": 1.0}},
        r"model\.capacity_factor = 1\.0 needs experts > 0",
    ),
    (
        {"model": {"preset": "llama-tiny", "rope_factor": 8.0}},
        r"model\.rope_factor = 8\.0 needs a rope_scaling; choose one, or set it to 1",
    ),
    (
        {"model": {"preset": "llama-tiny", "rotary_width": 16}},
        r'model\.rotary_width = 16 needs attention = "latent"; set that, or rotary_width = 0',
    ),
    (
        {"model": {"preset": "llama-tiny", "rope_scaling": "yarn", "rope_original_length": 64, "rope_theta": 1.0}},
        r'model\.rope_theta = 1\.0 must be over 1 for rope_scaling = "yarn"',
    ),
    (
        {"model": {"preset": "moe-tiny", "experts": 2, "experts_per_token": 3}},
        r"model\.experts_per_token = 3 must not exceed experts = 2",
    ),
    ({"model": {"preset": "deepseek-tiny", "kv_latent": 0}}, r"model\.attention = \"latent\" needs kv_latent > 0"),
    ({"profile": {"steps": [5]}}, r"profile\.steps = \[5\]: must be two steps, the first and the last"),
    ({"profile": {"steps": [5, 4]}}, r"profile\.steps = \[5, 4\]: must be two steps"),
    ({"name": "a/b"}, r"name = 'a/b': must be letters, digits, '\.', '_' and '-', the first"),
    ({"train": 3}, r"train = 3: must be a section, \[train\]"),
]


@pytest.mark.parametrize(("change", "expected"), MISTAKES, ids=[str(change) for change, _ in MISTAKES])
def test_mistake_is_one_line(change, expected):
    values = run_values("x", **{k: v for k, v in change.items() if isinstance(v, dict)})
    values |= {k: v for k, v in change.items() if not isinstance(v, dict)}
    with pytest.raises(UserError) as caught:
        make_run(values, where="my.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("my.toml: ")
    assert re.search(expected, message), message


def test_missing_keys_are_named():
    with pytest.raises(UserError) as caught:
        make_run({"name": "a"})
    assert str(caught.value) == "run: data: missing; add a section [data]\nrun: model: missing; add a section [model]"


def test_resolved_file_reads_back_equal():
    run = make_run(run_values("x", optimizer={"kind": "muon"}))
    again = make_run(tomllib.loads(run.to_toml()))
    assert again == run
    assert again != make_run(run_values("x"))


def test_preset_then_any_field():
    run = make_run(run_values("x", model={"preset": "llama-tiny", "kv_heads": 1, "positions": "rotary"}))
    assert (run.model.spec.family, run.model.spec.kv_heads, run.model.spec.head_width) == ("llama", 1, 16)
    assert run.model.spec.norm == "rmsnorm"


def test_overrides(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('name = "a"\n[data]\ntrain = "x"\n[model]\npreset = "gpt2"\n')
    run = load_run(path, ["train.steps=7", "optimizer.kind=lion", "name=b", "optimizer.learning_rate=1e-4"])
    assert (run.train.steps, run.optimizer.kind, run.name, run.optimizer.learning_rate) == (7, "lion", "b", 1e-4)
    for bad, expected in [
        ("train.steps", "form section.key=value"),
        ("name.x=1", "'name' is a key, not a section"),
        ("train.stesp=1", "train.stesp: unknown key; did you mean 'steps'"),
    ]:
        with pytest.raises(UserError, match=re.escape(expected)):
            load_run(path, [bad])


def test_an_override_of_a_key_that_takes_text_is_text(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('[data]\ntrain = "x"\n[model]\npreset = "gpt2"\n')
    for text in ("1", "2024-01-01", "true", "1e3"):
        assert load_run(path, [f"name={text}"]).name == text
    assert load_run(path, ['name="1"']).name == "1"
    assert load_run(path, ["data.validation=0.5"]).data.validation == 0.5
    with pytest.raises(UserError, match=r"overrides = 'train.steps=3': must be a list of section.key=value strings"):
        load_run(path, "train.steps=3")
    with pytest.raises(UserError, match=r"'a.toml': must be a dictionary of sections; load_run reads a run file"):
        make_run("a.toml")
    for bad, rule in [
        ("data.include=*.rs", r"""data.include = '\*.rs': must be a list, such as \["\*.rs"\]"""),
        ("profile.steps=3", r"profile.steps = 3: must be a list"),
        ("launch.workers=[2]", r"launch.workers.* = \[2\]: must be a list of at least 2"),
    ]:
        with pytest.raises(UserError, match=rule):
            load_run(path, [bad])


def test_a_resolved_run_file_takes_what_its_other_keys_allow(tmp_path):
    values = run_values("x")
    (tmp_path / "resolved.toml").write_text(make_run(values).to_toml())
    for changes in ({"width": 64}, {"heads": 4}, {"heads": 4, "kv_heads": 2}, {"width": 48, "head_width": 16}):
        overrides = [f"model.{key}={value}" for key, value in changes.items()]
        again, anew = load_run(tmp_path / "resolved.toml", overrides), make_run(values, overrides)
        assert again.model.spec.head_width == anew.model.spec.head_width
        assert again.model.spec.heads == anew.model.spec.heads
        assert again.model.spec.kv_heads == changes.get("kv_heads", again.model.spec.heads)
    assert load_run(tmp_path / "resolved.toml", ["model.preset=gpt2-tiny"]).model.width == 32
    for key, value in (("preset", "gpt2"), ("init", "hf:somewhere"), ("config", "hf:somewhere"), ("family", "llama")):
        with pytest.raises(UserError, match=rf"model.{key} = '{value}': can't be set over a resolved run file"):
            load_run(tmp_path / "resolved.toml", [f"model.{key}={value}"])


def test_a_tilde_that_begins_a_path_is_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    values = run_values("x", tokenizer={"kind": "hf:~/tokenizer"}, data={"store": "~/st", "chat": "~/chat.jinja"})
    run = make_run({**values, "run_dir": "~/runs/x"})
    assert (run.run_dir, run.data.store, run.data.chat) == ("/home/me/runs/x", "/home/me/st", "/home/me/chat.jinja")
    assert run.tokenizer.kind == "hf:/home/me/tokenizer"
    with pytest.raises(UserError, match=r"/home/me/model"):
        make_run({**run_values("x"), "model": {"init": "~/model"}})


def test_unreadable_run_files(tmp_path):
    with pytest.raises(UserError, match="no such run file"):
        load_run(tmp_path / "none.toml")
    with pytest.raises(UserError, match="is a folder"):
        load_run(tmp_path)
    (tmp_path / "bad.toml").write_text("name = \n")
    with pytest.raises(UserError, match=r"not valid TOML.*line 1"):
        load_run(tmp_path / "bad.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_examples_parse(path):
    assert load_run(path).name == path.stem


def test_number_of_keys():
    """Adding a key is a decision: it changes this number."""

    def count(model) -> int:
        return sum(
            count(field.annotation) if hasattr(field.annotation, "model_fields") else 1
            for field in model.model_fields.values()
        )

    assert count(Run) + count(MixedSource) + count(WeightFrom) == 151
