"""Which parameters are only ever read in the type that products are computed in."""

from meshwright.models.spec import ModelSpec


def is_multiplied(name: str, axes: int, spec: ModelSpec) -> bool:
    """Whether a parameter may be rounded to the type of the activations before it is used.

    Arguments:
        name: the parameter's own, such as `kernel`.
        axes: how many it has in one layer.
        spec: the architecture.
    """
    # A table whose rows are scaled or added to is read in float32.
    looked_up = () if spec.positions != "learned" and spec.embedding_scale == 1.0 else ("embedding",)
    return axes > 1 and name not in {"router", "position_embedding", *looked_up}
