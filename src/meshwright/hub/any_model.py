"""Models that are no family of Meshwright's own: whatever `AutoModelForCausalLM` of `transformers` makes of a config.

It is for `engine = "torch"` and does what the modules of `meshwright.models` do for their families: but the spec holds
just what training needs to know, beside the config itself as JSON, from which all is made. Tensors are named as
`transformers` names them; those that each layer has are one parameter of ours, stacked, so that adapters find them.

Code that comes with a checkpoint is never run.
"""

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from meshwright.errors import UserError
from meshwright.hub.any_names import SavedNames
from meshwright.models.hf import Family, refusal
from meshwright.models.spec import ANY, ModelSpec
from meshwright.models.weights import Rule, same, transposed

_DROPPED = ("auto_map", "_name_or_path", "transformers_version", "torch_dtype", "dtype", "_attn_implementation")
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "max_sequence_length", "n_ctx")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff")
_UNBOUNDED = 2**20
_LAYERDROP = re.compile(r"layer_?drop|drop_?path")
_ELSEWHERE = re.compile(rf"{_LAYERDROP.pattern}|classifier|summary")
"""What isn't of activations, or of a head that isn't used."""


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The spec of whatever model a `config.json` says.

    Raises:
        UserError: `transformers` isn't installed, or has no such causal language model.
    """
    kept = {key: value for key, value in config.items() if key not in _DROPPED}
    if "quantization_config" in kept:
        raise refusal("quantization_config", kept["quantization_config"], "quantized parameters can't be trained")
    made, name = _config_and_class(kept)
    kept["architectures"] = [name]
    text = made.get_text_config(decoder=True)
    width, heads = _count(text, ["hidden_size", "d_model", "n_embd"]), _count(text, ["num_attention_heads", "n_heads"])
    kv_heads = 1 if getattr(text, "multi_query", False) else _count(text, ["num_key_value_heads", "num_kv_heads"])
    _check_layerdrop(kept, made)
    return ModelSpec(
        family=ANY,
        config=json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False),
        vocab_size=_count(text, ["vocab_size"]) or _missing("vocab_size"),
        context_length=_count(text, _LENGTHS) or _UNBOUNDED,
        layers=_count(text, ["num_hidden_layers", "n_layers", "num_layers"]) or 1,
        width=width or _missing("hidden_size"),
        heads=heads or 1,
        kv_heads=kv_heads if kv_heads and heads % kv_heads == 0 else heads or 1,
        head_width=_count(text, ["head_dim"]) or width // (heads or 1) or 1,
        ffn_width=_count(text, _INNER) or 4 * width,
        positions="rotary",
        tied_embeddings=bool(getattr(text, "tie_word_embeddings", True)),
        dropout=max((rate for _, rate in _rates(made.to_dict())), default=0.0),
    )


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of a model."""
    return json.loads(spec.config)


def changed(config: dict[str, Any], *, vocab_size: int | None = None, dropout: float | None = None) -> dict[str, Any]:
    """A config with another vocabulary, or one rate of dropout (and of a router's jitter) wherever the model has some.

    Arguments:
        config: of `config.json`; a rate that it leaves to its class is written into it.
        vocab_size, dropout: None: as it is.
    """
    new = dict(config)
    if vocab_size is not None:
        new["vocab_size"] = vocab_size
    if dropout is not None:
        for path, rate in _rates(_config_and_class(config)[0].to_dict()):
            _put(new, path, 0 if isinstance(rate, int) and not dropout else dropout)  # some classes want an integer
    return new


def without_padding(config: dict[str, Any]) -> dict[str, Any]:
    """A config in which no token is padding: PyTorch doesn't train that one's embedding, and the id may be a word's.

    Arguments:
        config: of `config.json`; given back as it is where its class must have such a token.
    """
    new = {**config, "pad_token_id": None}
    if "text_config" in _config_and_class(config)[0].to_dict():
        new["text_config"] = {**(config.get("text_config") or {}), "pad_token_id": None}
    try:
        _config_and_class(new)
    except UserError:
        return config
    return new


def config_of(spec: ModelSpec) -> Any:
    """The config of `transformers`.

    Raises:
        UserError: see `spec_from_hf`.
    """
    return _config_and_class(hf_from_spec(spec))[0]


def make(spec: ModelSpec) -> Any:
    """The model, with parameters on the default device, float32.

    Raises:
        UserError: this version of `transformers` can't make it.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_config(config_of(spec), dtype=torch.float32, trust_remote_code=False)
    except (ValueError, TypeError, KeyError, ImportError, AttributeError, AssertionError) as error:
        kind = hf_from_spec(spec).get("model_type")
        raise UserError(
            f"config.json: model_type = {kind!r}: this version of transformers can't make the model "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}); "
            "install another"
        ) from error


def blocks_of(model: Any) -> tuple[str, list[Any]]:
    """The layers of a model, in order: the longest list of modules where such are that have none above; and its name.

    Arguments:
        model: of `transformers`.
    """
    from torch import nn

    level: list[tuple[str, Any]] = [("", model)]
    while level:
        found = [(name, list(module)) for name, module in level if isinstance(module, nn.ModuleList)]
        if found:
            return max(found, key=lambda pair: len(pair[1]))
        level = [
            (f"{name}.{last}" if name else last, child)
            for name, module in level
            for last, child in module.named_children()
        ]
    return "", []


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every tensor."""
    return _facts(spec.config)[0]


def family(spec: ModelSpec) -> Family:
    """How the tensors may be named: with the beginning that the model has without its head, or without."""
    prefix = _facts(spec.config)[1].base_model_prefix
    return Family(ANY, ((f"{prefix}.", ""),) if prefix else ())


def unread(spec: ModelSpec, names: list[str]) -> list[str]:
    """Those of a checkpoint's tensors that `transformers` wouldn't pass over in silence.

    Arguments:
        spec: the model.
        names: of tensors that no rule reads.
    """
    model = _facts(spec.config)[1]
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    return [n for n in names if n not in tied and not any(re.search(pattern, n) for pattern in patterns)]


@lru_cache(maxsize=4)
def _facts(config: str) -> tuple[list[Rule], Any]:
    """The rules, and the model, whose parameters take no memory."""
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    spec = spec_from_hf(json.loads(config))
    with torch.device("meta"):
        model = make(spec)
    kept = model.state_dict(keep_vars=True)
    tensors = {**dict(model.named_parameters()), **{n: kept[n] for n, _ in model.named_buffers() if n in kept}}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layered, saved = _layered(model, spec, shapes), SavedNames(model)
    rules: dict[str, Rule] = {}
    for name, tensor in tensors.items():
        if apart := saved.experts(name, shapes[name]) if tensor.ndim == 3 else []:
            rules |= {rule.ours: rule for rule in apart}
            continue
        owner, _, last = name.rpartition(".")
        theirs, module, how = layered.get(name, name), model.get_submodule(owner), same
        ours, there = theirs.replace("{layer}.", "").removesuffix(last), saved.of(theirs)
        if last == "weight" and isinstance(module, nn.Linear | Conv1D) and tensor.ndim == 2 and theirs == there:
            ours, how = f"{ours}kernel", transposed if isinstance(module, nn.Linear) else same
        else:
            ours += "scale" if last == "weight" and tensor.ndim == 1 else last
        rule = Rule(ours, theirs, how, how)
        rules[theirs] = rule if theirs == there else rule._replace(theirs=there, otherwise=rule)
    return list(rules.values()), model


def _layered(model: Any, spec: ModelSpec, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Of the tensors that each layer has, in one shape, the name with `{layer}` for the number."""
    prefix, blocks = blocks_of(model)
    if len(blocks) != spec.layers:
        return {}
    found: dict[str, str] = {}
    for name, shape in shapes.items():
        if not name.startswith(f"{prefix}.0."):
            continue
        rest = name.removeprefix(f"{prefix}.0.")
        names = [f"{prefix}.{layer}.{rest}" for layer in range(len(blocks))]
        if all(shapes.get(one) == shape for one in names):
            found |= dict.fromkeys(names, f"{prefix}.{{layer}}.{rest}")
    return found


def _config_and_class(config: dict[str, Any]) -> tuple[Any, str]:
    kind: Any = config.get("model_type")
    try:
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError:
        raise refusal(
            "model_type",
            kind,
            "is none of Meshwright's own, and for engine = \"torch\" needs transformers, which isn't installed "
            "(pip install 'meshwright[torch]')",
        ) from None
    if kind not in CONFIG_MAPPING or kind not in CAUSAL:
        what = "no causal language model" if kind in CONFIG_MAPPING else "nothing"
        raise refusal(
            "model_type",
            kind,
            f"this version of transformers has {what} of that name, and code that comes with a checkpoint is never run",
        )
    try:
        made = CONFIG_MAPPING[kind].from_dict({k: v for k, v in config.items() if k != "model_type"})
    except Exception as error:  # whatever the class checks
        said = f"{type(error).__name__}: {error}"
        raise refusal("model_type", kind, f"transformers refuses the config ({said})") from None
    name = CAUSAL[kind]
    return made, name if isinstance(name, str) else name[0]


def _count(config: Any, keys: Any) -> int:
    for key in keys:
        value = getattr(config, key, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _missing(key: str) -> int:
    raise refusal(key, None, "must be there")


def _rates(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """The rates of dropout that are in force in a model, with where they stand in its config."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _rates(value, (*above, key))
        elif _is_rate(value) and ("drop" in key or "jitter" in key) and not _ELSEWHERE.search(key):
            yield (*above, key), value


def _put(config: dict[str, Any], path: tuple[str, ...], value: float) -> None:
    for key in path[:-1]:
        config[key] = config = dict(config.get(key) or {})
    config[path[-1]] = value


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1


def _check_layerdrop(config: dict[str, Any], made: Any) -> None:
    for key, value in {**made.to_dict(), **config}.items():
        if _LAYERDROP.search(key) and _is_rate(value) and value > 0:
            raise refusal(
                key, value, "leaves out whole layers, which processes of a mesh can't do together; set it to 0"
            )
