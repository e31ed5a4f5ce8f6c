"""DeepSeek-V2 and V3 (2024): multi-head latent attention, many small experts, some of them shared."""

from meshwright.models.spec import ModelSpec


def _deepseek(
    layers: int,
    width: int,
    heads: int,
    head_width: int,
    rotary_width: int,
    kv_latent: int,
    query_latent: int,
    ffn_width: int,
    experts: int,
    context_length: int,
) -> ModelSpec:
    return ModelSpec(
        family="deepseek",
        layers=layers,
        width=width,
        heads=heads,
        head_width=head_width,
        attention="latent",
        rotary_width=rotary_width,
        kv_latent=kv_latent,
        query_latent=query_latent,
        ffn_width=ffn_width,
        experts=experts,
        experts_per_token=2,
        shared_experts=1,
        router="sigmoid",
        context_length=context_length,
        positions="rotary",
        norm="rmsnorm",
        activation="swiglu",
        bias=False,
        tied_embeddings=False,
    )


PRESETS = {
    "deepseek-tiny": _deepseek(
        layers=4,
        width=128,
        heads=4,
        head_width=32,
        rotary_width=16,
        kv_latent=64,
        query_latent=96,
        ffn_width=128,
        experts=4,
        context_length=256,
    ),
    "deepseek-1b": _deepseek(
        layers=16,
        width=1024,
        heads=16,
        head_width=64,
        rotary_width=32,
        kv_latent=256,
        query_latent=512,
        ffn_width=2048,
        experts=8,
        context_length=4096,
    ),
}
