"""GPT-2 (Radford et al., 2019): learned positions, pre-LayerNorm, GELU (tanh form), tied embeddings."""

from meshwright.models.spec import ModelSpec


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
