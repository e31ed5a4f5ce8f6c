"""The run file: one TOML file, typed sections, every mistake one clear line. Imports no framework."""

import copy
import json
import re
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    model_validator,
)

from meshwright.config_base import Section
from meshwright.config_data import DataSection, MixedSource, WeightFrom
from meshwright.config_dpo import DpoSection, check_dpo
from meshwright.config_launch import LaunchSection
from meshwright.config_train import (
    MESH_AXES,
    CheckpointSection,
    LoraSection,
    MeshSection,
    OptimizerSection,
    ProfileSection,
    ScheduleSection,
    TrackSection,
    TrainSection,
)
from meshwright.errors import UserError, closest
from meshwright.models.spec import ANY, ModelSpec
from meshwright.overrides import apply_overrides, expand_home
from meshwright.starting import from_checkpoint, from_config, from_preset, has_every_key, tokenizer_of
from meshwright.storage.store import copy_of, is_remote


def _name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError("letters, digits, '.', '_' and '-', the first a letter or a digit")
    return value


class TokenizerSection(Section):
    """How text becomes token ids."""

    kind: str = "bpe"
    """`bytes`, `bpe` (trained on the training documents), `tiktoken:<name>`, or `hf:<name or folder>`. Left out where
    `model.init` names a checkpoint: the one that came with it."""
    vocab_size: PositiveInt = 4096
    """Size of the vocabulary that `bpe` trains, end of text included; the other kinds bring their own."""
    add_bos: bool = False
    """Whether documents and prompts begin with the beginning of text (`bos_token`) of a tokenizer of kind `hf:…`, as
    models expect that were trained so, such as Gemma. A conversation begins as its template says."""

    @model_validator(mode="after")
    def _check_add_bos(self) -> Self:
        if self.add_bos and not self.kind.startswith("hf:"):
            raise ValueError(f'add_bos = true: is of kind "hf:…"; {self.kind} has no beginning of text: leave it out')
        return self


_STARTS = {"preset": "", "init": "random", "config": ""}  # what says where the other keys come from


class ModelSection(ModelSpec):
    """A preset, then any field of the spec by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    preset: str = ""
    """The architecture to start from; the table below lists them. May be left out where `init` names a checkpoint."""
    init: str = "random"
    """What the parameters start as: `random`, those of `hf:<folder or name>`, or those of a run directory."""

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, values: dict) -> dict:
        if not isinstance(values, dict):
            return values
        name, init, config = (values.get(key, other) for key, other in _STARTS.items())
        if not all(isinstance(value, str) for value in (name, init, config)):
            return values
        is_resolved = has_every_key(values)  # and stays good when the checkpoint is gone
        if init != "random":
            return values if is_resolved else from_checkpoint(values, name, init)
        if config and name:
            raise ValueError(f"config: both it and preset = {name!r} say what the model is; leave one of them out")
        if config or (is_resolved and not name):
            return values if is_resolved else from_config(values)
        if not name:
            raise ValueError(
                "preset: missing; add model.preset = …, or name a checkpoint as model.init, or a config as model.config"
            )
        return from_preset(values, name)

    @property
    def spec(self) -> ModelSpec:
        """The architecture alone, without the keys that say how to start."""
        return ModelSpec(**self.model_dump(exclude={"preset", "init"}))


class Run(Section):
    """A whole run file, checked."""

    name: Annotated[str, AfterValidator(_name)] = "run"
    """Name of the run: letters, digits, `.`, `_` and `-`."""
    engine: Literal["jax", "torch"] = "jax"
    """What trains the model: JAX, or PyTorch with the models of `transformers` (`pytorch.md`)."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the initial parameters, the order of the data, dropout and samples."""
    run_dir: str = ""
    """Folder of the run, or `s3://bucket/path` or `gs://bucket/path`; empty: `runs/<name>`."""
    data: DataSection
    tokenizer: TokenizerSection = TokenizerSection()
    model: ModelSection
    lora: LoraSection = LoraSection()
    dpo: DpoSection = DpoSection()
    mesh: MeshSection = MeshSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection = TrainSection()
    checkpoint: CheckpointSection = CheckpointSection()
    launch: LaunchSection = LaunchSection()
    track: TrackSection = TrackSection()
    profile: ProfileSection = ProfileSection()

    @model_validator(mode="before")
    @classmethod
    def _with_its_tokenizer(cls, values: Any) -> Any:
        sections = [values.get(name, {}) for name in ("model", "tokenizer")] if isinstance(values, dict) else []
        if not sections or not all(isinstance(section, dict) for section in sections):
            return values
        init = sections[0].get("init", "random")
        if not isinstance(init, str) or init == "random" or "kind" in sections[1]:
            return values
        kind = tokenizer_of(init)
        return {**values, "tokenizer": {**sections[1], "kind": kind}} if kind else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        t = self.train
        if t.micro_batch_size and t.batch_size % t.micro_batch_size:
            fits = [m for m in range(1, t.batch_size + 1) if t.batch_size % m == 0]
            raise ValueError(
                f"train.batch_size = {t.batch_size} must be a multiple of train.micro_batch_size = "
                f"{t.micro_batch_size}; set micro_batch_size to one of {fits}"
            )
        if t.sequence_length > self.model.context_length:
            raise ValueError(
                f"train.sequence_length = {t.sequence_length} must not exceed model.context_length = "
                f"{self.model.context_length}; shorten the one or raise the other"
            )
        if self.schedule.warmup_steps > t.steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} must not exceed train.steps = {t.steps}; "
                "shorten the warm-up"
            )
        after_warmup = t.steps - self.schedule.warmup_steps
        if self.schedule.kind == "wsd" and self.schedule.decay_steps > after_warmup:
            raise ValueError(
                f"schedule.decay_steps = {self.schedule.decay_steps} must not exceed the {after_warmup} steps after "
                "the warm-up; shorten the decay"
            )
        if self.lora.rank and self.model.init == "random":
            raise ValueError(
                f"lora.rank = {self.lora.rank}: adapters are added to trained parameters; name a checkpoint as "
                "model.init, or leave [lora] out"
            )
        if self.lora.quantize != "none" and self.engine != "torch":
            raise ValueError(
                f'lora.quantize = "{self.lora.quantize}": engine = "{self.engine}" has no maps in 4 bits; set engine = '
                '"torch"'
            )
        if self.model.family == ANY and self.engine != "torch":
            kind = json.loads(self.model.config).get("model_type")
            raise ValueError(
                f'engine = "{self.engine}": has no model of model_type {kind!r}, as the config.json says, which is of '
                'none of Meshwright\'s own families; set engine = "torch"'
            )
        if self.profile.steps and self.profile.steps[0] > t.steps:
            raise ValueError(
                f"profile.steps = {self.profile.steps} must not begin after train.steps = {t.steps}; name earlier steps"
            )
        self._check_mesh()
        self._check_stream()
        if self.data.packing == "pairs":
            check_dpo(self.data, self.engine, self.lora.rank)
        elif self.dpo != DpoSection():
            raise ValueError(f'dpo.beta = {self.dpo.beta:g}: needs data.packing = "pairs"; set it, or leave [dpo] out')
        if self.optimizer.kind == "schedule_free" and self.optimizer.beta1 == 0:
            raise ValueError("optimizer.beta1 = 0 must be greater than 0 under schedule_free; 0.9 is usual")
        return self

    def _check_mesh(self) -> None:
        left = [name for name in MESH_AXES if getattr(self.mesh, name) == -1]
        if len(left) > 1:
            raise ValueError(f"mesh.{left[1]} = -1: only one size may be -1, and mesh.{left[0]} is; give it a number")
        if self.mesh.pipeline == 1 and self.mesh.pipeline_rounds > 1:
            raise ValueError(
                f"mesh.pipeline_rounds = {self.mesh.pipeline_rounds}: needs mesh.pipeline of 2 or more; leave it out"
            )

    def _check_stream(self) -> None:
        data, launch = self.data, self.launch
        if launch.address and launch.kind != "ray" and not data.stream:
            raise ValueError(
                f'launch.address = {launch.address!r}: needs launch.kind = "ray" or data.stream = true; leave it out'
            )
        if not data.stream:
            return
        if launch.kind != "local":
            raise ValueError(f'launch.kind = "{launch.kind}": data.stream trains in one process; set it to "local"')
        if data.packing != "stream":
            raise ValueError(f'data.packing = "{data.packing}": under data.stream it must be "stream"; set it')
        if data.deduplicate:
            raise ValueError("data.deduplicate = true: data.stream doesn't remember what it has read; leave it out")
        if data.validation and not isinstance(data.validation, str):
            raise ValueError(
                f"data.validation = {data.validation}: under data.stream it must be a source of its own, or 0; set it"
            )

    @property
    def directory(self) -> Path:
        """The run directory; of one on an object store this machine's copy."""
        return copy_of(self.run_dir) if is_remote(self.run_dir) else Path(self.run_dir or f"runs/{self.name}")

    @property
    def place(self) -> Path | str:
        """Where others find the run directory: the folder, or the address of one on an object store."""
        return self.run_dir if is_remote(self.run_dir) else self.directory

    @property
    def micro_batch_size(self) -> int:
        """Sequences at a time, whole mesh."""
        return self.train.micro_batch_size or self.train.batch_size

    def to_toml(self) -> str:
        """The resolved run file: every key with its value. Loading it gives an equal `Run`."""
        import tomli_w

        return tomli_w.dumps(self.model_dump(exclude_none=True))


def load_run(path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> Run:
    """Read and check a run file.

    Arguments:
        path: a TOML file; its name, without the ending, is the run's where `name` isn't given.
        overrides: `section.key=value` strings, applied over the file in order; values are TOML, and what isn't
            TOML is taken as a string.

    Raises:
        UserError: the file is missing or not TOML, or a key, a type, a value or a combination is wrong.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such run file; see examples/ for some to start from") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give the path of a run file (.toml)") from None
    except OSError as error:
        raise UserError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._") or "run"
    return make_run({"name": name, **values}, overrides, where=str(path))


def make_run(values: dict[str, Any], overrides: list[str] | tuple[str, ...] = (), *, where: str = "run") -> Run:
    """Check a run given as nested dictionaries.

    Arguments:
        values: as `tomllib` reads them; left as they are. A `~` that begins a path is this user's home.
        overrides: as for `load_run`.
        where: what error messages call the run.

    Raises:
        UserError: a key, a type, a value or a combination is wrong; one line for each.
    """
    if not isinstance(values, dict):
        raise UserError(f"{values!r}: must be a dictionary of sections; load_run reads a run file")
    values = copy.deepcopy(values)
    apply_overrides(values, overrides, Run)
    expand_home(values)
    try:
        return Run.model_validate(values)
    except ValidationError as error:
        lines = [f"{where}: {_explain(item)}" for item in error.errors()]
        raise UserError("\n".join(lines)) from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _explain(item: Any) -> str:
    path = [str(part) for part in item["loc"] if not str(part).startswith("<")]
    key = ".".join(path)
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key{closest(path[-1], _keys_of(path[:-1]))}"
    if item["type"] == "missing":
        return f"{key}: missing; add {'a section [' + key + ']' if key in ('data', 'model') else key + ' = …'}"
    if item["type"] == "value_error" and isinstance(item["input"], dict):
        message = str(item["ctx"]["error"])  # from a check of a whole section: it begins with a key of that section
        return f"{key}.{message}" if key else message
    if item["type"] == "value_error":
        return f"{key} = {item['input']!r}: must be {item['ctx']['error']}"
    if item["type"] == "model_type":
        return f"{key} = {item['input']!r}: must be a section, [{key}]"
    if item["type"] in ("list_type", "too_short", "too_long"):
        return f"{key} = {item['input']!r}: must be {_rule_of_list(item)}"
    rule = item["msg"].removeprefix("Input ").removeprefix("should be ")
    return f"{key} = {item['input']!r}: must be {rule}"


def _rule_of_list(item: Any) -> str:
    limits = item.get("ctx", {})
    if "min_length" in limits:
        return f"a list of at least {limits['min_length']}"
    if "max_length" in limits:
        return f"a list of at most {limits['max_length']}"
    return f"""a list, such as ["{item["input"]}"]""" if isinstance(item["input"], str) else "a list"


_LISTED: dict[Any, type[Section]] = {(DataSection, "train"): MixedSource, (MixedSource, "later"): WeightFrom}


def _keys_of(path: list[str]) -> list[str]:
    model: Any = Run
    for part in path:
        if not part.isdecimal():
            model = _LISTED.get((model, part)) or model.model_fields[part].annotation
    return list(model.model_fields)
