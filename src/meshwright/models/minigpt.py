"""miniGPT, the model of the JAX pretraining tutorial: learned positions, post-LayerNorm, ReLU, untied head."""

from meshwright.models.spec import ModelSpec


def _minigpt(layers: int, width: int, heads: int, context_length: int) -> ModelSpec:
    return ModelSpec(
        family="minigpt",
        layers=layers,
        width=width,
        heads=heads,
        ffn_width=width,
        context_length=context_length,
        norm_placement="post",
        norm_eps=1e-6,
        activation="relu",
        tied_embeddings=False,
        head_bias=True,
        dropout=0.1,
    )


PRESETS = {
    "minigpt-tiny": _minigpt(layers=4, width=128, heads=4, context_length=128),
    "minigpt": _minigpt(layers=8, width=256, heads=8, context_length=256),
}
