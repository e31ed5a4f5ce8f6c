"""GPT-2 (Radford et al., 2019): learned positions, pre-LayerNorm, GELU (tanh form), tied embeddings."""

from typing import Any

from meshwright.models.hf import Fields, refusal
from meshwright.models.spec import ModelSpec
from meshwright.models.weights import Rule, linear


def _gpt2(layers: int, width: int, heads: int, context_length: int = 1024, dropout: float = 0.0) -> ModelSpec:
    return ModelSpec(
        family="gpt2",
        layers=layers,
        width=width,
        heads=heads,
        ffn_width=4 * width,
        context_length=context_length,
        dropout=dropout,
    )


PRESETS = {
    "gpt2-tiny": _gpt2(layers=4, width=128, heads=4, context_length=256),
    "gpt2-mini": _gpt2(layers=6, width=384, heads=6, context_length=512),
    "gpt2": _gpt2(layers=12, width=768, heads=12),
    "gpt2-medium": _gpt2(layers=24, width=1024, heads=16),
    "gpt2-large": _gpt2(layers=36, width=1280, heads=20),
    "gpt2-xl": _gpt2(layers=48, width=1600, heads=25),
}


def spec_from_hf(config: dict[str, Any]) -> ModelSpec:
    """The architecture that a `config.json` says; raises `UserError` where it can't be represented."""
    fields = Fields(config, _IGNORED)
    fields.expect("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu_fast")
    fields.expect("scale_attn_weights", True)
    fields.expect("scale_attn_by_inverse_layer_idx", False)
    fields.expect("add_cross_attention", False)
    width = fields.take("n_embd", 768)
    drops = {part: fields.take(f"{part}_pdrop", 0.1) for part in ("resid", "embd", "attn")}
    if len(set(drops.values())) > 1:
        raise refusal("*_pdrop", drops, 'can\'t differ; set model.dropout, or model.family = "transformers"')
    spec = ModelSpec(
        family="gpt2",
        vocab_size=fields.take("vocab_size", 50_257),
        layers=fields.take("n_layer", 12),
        width=width,
        heads=fields.take("n_head", 12),
        ffn_width=fields.take("n_inner", 4 * width),
        context_length=fields.take("n_positions", 1024),
        norm_eps=fields.take("layer_norm_epsilon", 1e-5),
        tied_embeddings=fields.take("tie_word_embeddings", True),
        dropout=drops["resid"],
    )
    fields.done()
    return spec


_IGNORED = (
    *("n_ctx", "n_special", "predict_special_tokens", "reorder_and_upcast_attn"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
)


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """The `config.json` of an architecture."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": spec.vocab_size,
        "n_layer": spec.layers,
        "n_embd": spec.width,
        "n_head": spec.heads,
        "n_inner": spec.ffn_width,
        "n_positions": spec.context_length,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        "resid_pdrop": spec.dropout,
        "embd_pdrop": spec.dropout,
        "attn_pdrop": spec.dropout,
    }


def weights(spec: ModelSpec) -> list[Rule]:
    """The rules for every parameter; kernels lie as ours do."""
    layer = "transformer.h.{layer}"
    rules = [
        Rule("embedding", "transformer.wte.weight"),
        Rule("position_embedding", "transformer.wpe.weight"),
        *_norm("final_norm", "transformer.ln_f"),
        *_norm("blocks.attention_norm", f"{layer}.ln_1"),
        *_norm("blocks.mlp_norm", f"{layer}.ln_2"),
    ]
    for number, part in enumerate(("query", "key", "value")):
        columns = slice(number * spec.width, (number + 1) * spec.width)
        rules += _map(f"blocks.attention.{part}", f"{layer}.attn.c_attn", columns)
    rules += _map("blocks.attention.out", f"{layer}.attn.c_proj")
    rules += _map("blocks.mlp.up", f"{layer}.mlp.c_fc") + _map("blocks.mlp.down", f"{layer}.mlp.c_proj")
    return rules if spec.tied_embeddings else [*rules, *linear("head", "lm_head")]


def _norm(ours: str, theirs: str) -> list[Rule]:
    return [Rule(f"{ours}.scale", f"{theirs}.weight"), Rule(f"{ours}.bias", f"{theirs}.bias")]


def _map(ours: str, theirs: str, part: slice | None = None) -> list[Rule]:
    return [Rule(f"{ours}.kernel", f"{theirs}.weight", part=part), Rule(f"{ours}.bias", f"{theirs}.bias", part=part)]
