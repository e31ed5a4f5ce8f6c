"""Llama (Touvron et al., 2023): RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

from meshwright.models.spec import ModelSpec


def _llama(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    ffn_width: int,
    context_length: int = 2048,
    rope_theta: float = 10_000.0,
    tied: bool = True,
) -> ModelSpec:
    return ModelSpec(
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=ffn_width,
        context_length=context_length,
        rope_theta=rope_theta,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied_embeddings=tied,
    )


PRESETS = {
    "llama-tiny": _llama(layers=4, width=128, heads=4, kv_heads=2, ffn_width=352, context_length=256),
    "llama-mini": _llama(layers=6, width=256, heads=4, kv_heads=2, ffn_width=704, context_length=512),
    "llama-135m": _llama(layers=30, width=576, heads=9, kv_heads=3, ffn_width=1536),
    "llama-360m": _llama(layers=32, width=960, heads=15, kv_heads=5, ffn_width=2560),
    "llama-1b": _llama(
        layers=16, width=2048, heads=32, kv_heads=8, ffn_width=8192, context_length=8192, rope_theta=500_000.0
    ),
}
