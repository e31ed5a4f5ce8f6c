"""Families of checkpoints as Hugging Face keeps them: which there are, and what helps to read and write a config.

A family is a module of `meshwright.models` with

- `spec_from_hf(config: dict) -> ModelSpec`, which raises `UserError` at what it can't represent,
- `hf_from_spec(spec: ModelSpec) -> dict`, which undoes it, and
- `weights(spec: ModelSpec) -> list[Rule]`.

For models that are of none, `meshwright.hub.any_model` has the same functions.

Imports no framework.
"""

from collections.abc import Container, Iterable
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple

from meshwright.errors import UserError
from meshwright.models.spec import ANY, ModelSpec
from meshwright.models.weights import Rule


class Family(NamedTuple):
    """What tells a checkpoint of a family, and how its tensors may be named."""

    module: str
    """The module in `meshwright.models`; also `ModelSpec.family`."""
    prefixes: tuple[tuple[str, str], ...] = ()
    """Other beginnings of names: (as in a rule, as it may be in a checkpoint)."""
    unused: tuple[str, ...] = ()
    """Patterns of tensors that a checkpoint may hold besides and that change nothing."""
    more_layers: int = 0
    """Layers that a checkpoint may hold behind its last one, to predict further tokens with."""


_NO_PREFIX = (("model.", ""),)  # of a checkpoint of the model without its head
_COMPUTED = ("*.rotary_emb.inv_freq",)
_GEMMA3 = (("model.", "language_model.model."), ("model.", "model.language_model."), *_NO_PREFIX)
_FURTHER = tuple(
    f"model.layers.*.{name}" for name in ("embed_tokens.*", "enorm.*", "hnorm.*", "eh_proj.*", "shared_head.*")
)
_IMAGES = ("*vision_tower.*", "*multi_modal_projector.*")

FAMILIES: dict[str, Family] = {
    "gpt2": Family("gpt2", (("transformer.", ""),), ("*.attn.bias", "*.attn.masked_bias")),
    "gemma3": Family("gemma3", _GEMMA3, (*_COMPUTED, *_IMAGES)),
    "gemma3_text": Family("gemma3", _NO_PREFIX, _COMPUTED),
    "deepseek_v2": Family("deepseek", _NO_PREFIX, _COMPUTED),
    "deepseek_v3": Family("deepseek", _NO_PREFIX, (*_COMPUTED, *_FURTHER), more_layers=1),
} | {
    name: Family(name, _NO_PREFIX, _COMPUTED)
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "olmo2", "mixtral", "qwen3_moe")
}
"""Every family by the `model_type` of its configs."""


def family_of(config: dict[str, Any]) -> Family:
    """The family of a checkpoint.

    Arguments:
        config: its `config.json`.

    Raises:
        UserError: there is none for its `model_type`.
    """
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise refusal("model_type", model_type, f"can be one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def spec_from_hf(config: dict[str, Any], family: str = "") -> ModelSpec:
    """The architecture that a checkpoint's `config.json` says.

    Arguments:
        config: what it says.
        family: `ANY`: as `transformers` has it; empty: as Meshwright's own families have it.

    Raises:
        UserError: it can't be represented; the key is named.
    """
    if family == ANY:
        return any_model().spec_from_hf(config)
    return import_module(f"meshwright.models.{family_of(config).module}").spec_from_hf(config)


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture, without its keys for tokens and types; undoes `spec_from_hf`.

    Raises:
        UserError: the spec's family can't represent it.
    """
    config = _module(spec).hf_from_spec(spec)
    if spec.family == ANY:
        return config
    if not spec.experts and any(rule.ours.endswith(".router") for rule in weights(spec)):
        raise UserError(
            f"model.experts = 0: a checkpoint of the family {spec.family} has some; set it so, or choose another "
            "model.family"
        )
    read = spec_from_hf(config)
    for key in ModelSpec.model_fields:
        ours, theirs = getattr(spec, key), getattr(read, key)
        same_windows = key == "global_every" and spec.layer_windows == read.layer_windows
        if ours != theirs and key not in _TRAINING and not same_windows:
            raise UserError(
                f"model.{key} = {ours!r}: a checkpoint of the family {spec.family} has {theirs!r} here; "
                "set it so, or choose another model.family"
            )
    return config


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every parameter of an architecture, by its family.

    Raises:
        UserError: checkpoints of that family can't be written.
    """
    return _module(spec).weights(spec)


def tensor_name(name: str, present: Container[str], family: Family) -> str | None:
    """What a checkpoint calls a tensor.

    Arguments:
        name: as in a rule.
        present: the names in the checkpoint.
        family: of the checkpoint.

    Returns:
        The name in the checkpoint; None: it isn't there.
    """
    others = (there + name.removeprefix(here) for here, there in family.prefixes if name.startswith(here))
    return next((found for found in (name, *others) if found in present), None)


def unread_tensors(present: Iterable[str], rules: list[Rule], family: Family, spec: ModelSpec) -> list[str]:
    """Tensors of a checkpoint that no rule reads and that aren't known to change nothing.

    Arguments:
        present: the names in the checkpoint.
        rules: of the spec.
        family, spec: of the checkpoint.
    """
    present, wanted = set(present), set()
    sizes = {"layer": range(spec.layers + family.more_layers), "expert": range(max(1, spec.experts))}
    for theirs in {rule.theirs for rule in rules}:
        layers = sizes["layer"] if "{layer}" in theirs else range(1)
        experts = sizes["expert"] if "{expert}" in theirs else range(1)
        names = {theirs.format(layer=layer, expert=expert) for layer in layers for expert in experts}
        wanted |= {tensor_name(name, present, family) for name in names}
    unused = (*family.unused, "*lm_head.weight") if spec.tied_embeddings else family.unused
    return sorted(n for n in present - wanted if not any(fnmatchcase(n, pattern) for pattern in unused))


def any_model() -> Any:
    """The module of what is of no family: it needs `transformers`, and nothing here does."""
    return import_module("meshwright.hub.any_model")


def _module(spec: ModelSpec) -> Any:
    if spec.family == ANY:
        return any_model()
    if not any(family.module == spec.family for family in FAMILIES.values()):
        raise UserError(
            f"model.family = {spec.family!r}: has no Hugging Face form; "
            f"those that have: {', '.join(sorted({family.module for family in FAMILIES.values()}))}"
        )
    return import_module(f"meshwright.models.{spec.family}")


_TRAINING = {"dropout", "balance_loss", "router_z_loss"}
# Keys of the spec that change nothing where a model is only used, and so may be lost.

_IGNORED = frozenset(
    """_attn_implementation _attn_implementation_autoset _name_or_path architectures attention_dropout auto_map
    bos_token_id cache_implementation chunk_size_feed_forward decoder_start_token_id dtype eos_token_id
    finetuning_task gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder label2id
    model_type output_attentions output_hidden_states output_router_logits pad_token_id prefix pretraining_tp
    problem_type return_dict sep_token_id task_specific_params tokenizer_class torch_dtype torchscript
    transformers.js_config transformers_version unsloth_fixed unsloth_version use_cache use_return_dict""".split()
)
# Keys of configs that can't change logits.


def refusal(key: str, value: Any, rule: str) -> UserError:
    """The error for a key of a config.

    Arguments:
        key, value: as they stand in `config.json`.
        rule: what it can be here.
    """
    return UserError(f"config.json: {key} = {value!r}: {rule}; this checkpoint can't be represented")


class Fields:
    """A config being read, which knows in the end what nobody asked for.

    Arguments:
        config: of `config.json`; a key whose value is None counts as absent.
        ignored: keys that can't change logits, besides those common to all families.
        inside: what the keys' names begin with, where the config is a part of another.
    """

    def __init__(self, config: dict[str, Any], ignored: Iterable[str] = (), *, inside: str = ""):
        self._config = {key: value for key, value in config.items() if value is not None}
        self._null = config.keys() - self._config.keys()
        self._read = {*_IGNORED, *ignored}
        self._inside = inside

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def is_null(self, key: str) -> bool:
        """Whether a key is there with the value None, where that isn't the same as absence."""
        return key in self._null

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key.

        Arguments:
            key: of the config.
            default: where it is absent; None: it mustn't be.

        Raises:
            UserError: it is absent, or of another type than the default.
        """
        self._read.add(key)
        value = self._config.get(key, default)
        if value is None:
            raise refusal(self._inside + key, None, "must be there")
        kinds = (int, float) if isinstance(default, float) else type(default)
        wrong = not isinstance(value, kinds) or isinstance(value, bool) != isinstance(default, bool)
        if default is not None and wrong:
            raise refusal(self._inside + key, value, f"must be a {type(default).__name__}")
        return value

    def expect(self, key: str, *allowed: Any) -> None:
        """Refuse every value of a key but some.

        Arguments:
            key: of the config.
            allowed: its values; absence is right too.

        Raises:
            UserError: it has another.
        """
        value = self._config.get(key, allowed[0])
        self._read.add(key)
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            raise refusal(self._inside + key, value, f"can be {' or '.join(repr(one) for one in allowed)} alone")

    def done(self) -> None:
        """Refuse what nobody asked for.

        Raises:
            UserError: there is such a key.
        """
        for key, value in self._config.items():
            if key not in self._read:
                raise refusal(self._inside + key, value, "isn't known here, and might change what the model says")
