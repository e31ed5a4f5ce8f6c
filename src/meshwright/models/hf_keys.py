"""Keys that the configs of many families share, read and written. Imports no framework.

transformers 5 writes what belongs to rotary positions as `rope_parameters`; before, it was `rope_theta` and
`rope_scaling`, and version 4 reads these alone. Both are read, and both are written.
"""

from collections.abc import Callable
from typing import Any

from meshwright.models.hf import Fields, refusal
from meshwright.models.spec import ModelSpec

_SLIDING, _FULL = "sliding_attention", "full_attention"


def read_sizes(fields: Fields, *, eps: float, tied: bool, all_heads: bool = True) -> dict[str, Any]:
    """What a model like Llama has of sizes, and what all of that kind have alike.

    Arguments:
        fields: of the config.
        eps, tied: the family's defaults for `rms_norm_eps` and `tie_word_embeddings`.
        all_heads: whether absence of `num_key_value_heads` means as many as there are heads.

    Returns:
        Keys of `ModelSpec`.
    """
    width, heads = fields.take("hidden_size"), fields.take("num_attention_heads")
    return {
        "vocab_size": fields.take("vocab_size"),
        "context_length": fields.take("max_position_embeddings"),
        "layers": fields.take("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": fields.take("num_key_value_heads", heads if all_heads else None),
        "head_width": fields.take("head_dim", width // heads),
        "ffn_width": fields.take("intermediate_size"),
        "norm_eps": fields.take("rms_norm_eps", eps),
        "tied_embeddings": fields.take("tie_word_embeddings", tied),
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
    }


def write_sizes(spec: ModelSpec, model_type: str, architecture: str) -> dict[str, Any]:
    """Undoes `read_sizes`.

    Arguments:
        spec: the architecture.
        model_type, architecture: what transformers calls the family and its causal language model.
    """
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.width,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_width,
        "intermediate_size": spec.ffn_width,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
    }


def read_rope(fields: Fields) -> dict[str, Any]:
    """Keys of `ModelSpec` for rotary positions that are the same in all layers."""
    fields.expect("partial_rotary_factor", 1.0)
    older, newer = fields.take("rope_scaling", {}), fields.take("rope_parameters", {})
    key, theta = "rope_scaling" if older else "rope_parameters", fields.take("rope_theta", 10_000.0)
    return read_scaling(key, {"rope_theta": theta, **(older or newer)}, fields.take("max_position_embeddings"))


def read_scaling(key: str, parameters: dict[str, Any], context_length: int) -> dict[str, Any]:
    """Keys of `ModelSpec` for the rotary positions of some layers.

    Arguments:
        key: where `parameters` stand in the config.
        parameters: as transformers has them, `rope_theta` among them.
        context_length: the original length, where they don't say.
    """
    plain = {name: value for name, value in parameters.items() if name != "type"}
    kind = plain.get("rope_type", parameters.get("type", "default"))
    inner = Fields(plain, {"rope_type"}, inside=f"{key}.")
    inner.expect("partial_rotary_factor", 1.0)
    read = {"rope_theta": inner.take("rope_theta", 10_000.0)}
    if kind in ("linear", "llama3", "yarn"):
        read |= {"rope_scaling": kind, "rope_factor": inner.take("factor")}
    elif kind != "default":
        raise refusal(f"{key}.rope_type", kind, "can be 'default', 'linear', 'llama3' or 'yarn'")
    if kind in ("llama3", "yarn"):
        read["rope_original_length"] = inner.take("original_max_position_embeddings", context_length)
    if kind == "llama3":
        read["rope_low_frequency"] = inner.take("low_freq_factor")
        read["rope_high_frequency"] = inner.take("high_freq_factor")
    if kind == "yarn":
        read["rope_beta_fast"] = inner.take("beta_fast", 32.0)
        read["rope_beta_slow"] = inner.take("beta_slow", 1.0)
        inner.expect("truncate", True)
        growth = inner.take("mscale", 0.0), inner.take("mscale_all_dim", 0.0)
        if all(growth):
            read["rope_mscale"], read["rope_mscale_all"] = growth
    inner.done()
    return read


def write_rope(spec: ModelSpec) -> dict[str, Any]:
    """Undoes `read_rope`."""
    newer = write_scaling(spec)
    older = {name: value for name, value in newer.items() if name != "rope_theta"}
    scaled = {} if spec.rope_scaling == "none" else {"rope_scaling": older}
    return {"rope_parameters": newer, "rope_theta": spec.rope_theta, **scaled}


def write_scaling(spec: ModelSpec) -> dict[str, Any]:
    """Undoes `read_scaling`."""
    written: dict[str, Any] = {
        "rope_type": "default" if spec.rope_scaling == "none" else spec.rope_scaling,
        "rope_theta": spec.rope_theta,
    }
    if spec.rope_scaling != "none":
        written["factor"] = spec.rope_factor
    if spec.rope_scaling in ("llama3", "yarn"):
        written["original_max_position_embeddings"] = spec.rope_original_length
    if spec.rope_scaling == "llama3":
        written |= {"low_freq_factor": spec.rope_low_frequency, "high_freq_factor": spec.rope_high_frequency}
    if spec.rope_scaling == "yarn":
        written |= {"beta_fast": spec.rope_beta_fast, "beta_slow": spec.rope_beta_slow}
        if spec.rope_mscale:
            written |= {"mscale": spec.rope_mscale, "mscale_all_dim": spec.rope_mscale_all}
    return written


def read_layer_types(fields: Fields, layers: int, window: int, slides: Callable[[int], bool]) -> dict[str, Any]:
    """Keys of `ModelSpec` for windows.

    Arguments:
        fields: of the config, of which `layer_types` is read.
        layers: how many there are.
        window: how many tokens a token sees in a layer that has a window; 0: there is none.
        slides: which layers, counted from 0, have one where the config has no `layer_types`.

    Raises:
        UserError: the layers that see all aren't each n-th one.
    """
    default = [_SLIDING if window and slides(layer) else _FULL for layer in range(layers)]
    types = fields.take("layer_types", default)
    for kind in types:
        if kind not in (_SLIDING, _FULL):
            raise refusal("layer_types", kind, f"can hold {_SLIDING!r} and {_FULL!r}")
    if len(types) != layers:
        raise refusal("layer_types", types, f"must have num_hidden_layers = {layers} entries")
    if _SLIDING not in types:
        return {}
    if not window:
        raise refusal("sliding_window", None, "must be there where layers slide")
    every = types.index(_FULL) + 1 if _FULL in types else 0
    expected = [_FULL if every and (layer + 1) % every == 0 else _SLIDING for layer in range(layers)]
    if types != expected:
        raise refusal("layer_types", types, f"either none or each n-th layer can be {_FULL!r} beside {_SLIDING!r}")
    return {"window": window, "global_every": every}


def write_layer_types(spec: ModelSpec) -> list[str]:
    """Undoes `read_layer_types`."""
    return [_SLIDING if window else _FULL for window in spec.layer_windows]
