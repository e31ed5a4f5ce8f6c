"""Which axis of which array lies along which axis of the mesh. One table for parameters, one for activations.

Keys are the names that models give to the axes of their arrays; values are mesh axes, the most significant first. An
axis whose name isn't here is not cut.
"""

PARAMETERS: dict[str, tuple[str, ...]] = {
    "layers": ("pipeline",),
    "experts": ("expert",),
    "width": ("fsdp",),
    "latent": ("fsdp",),
    "vocab": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "ffn": ("tensor",),
}

GATHERED = ("fsdp",)
"""Mesh axes along which a layer's parameters are gathered while it computes."""

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", "expert"),
    "batch_beside_experts": ("data", "fsdp"),
    "batch_beside_width": ("data", "expert"),
    "width": ("fsdp",),  # of rows of a table that is cut so
    "experts": ("expert",),
    "time": ("context",),
    "sequence": ("context", "tensor"),  # between the parts of a block, where each token stands alone
    "loss_time": ("context", "pipeline"),  # the stages share the work of the head
    "heads": ("tensor",),
    "ffn": ("tensor",),
}

PASSING = ("batch_beside_width", "width")
"""Names in `ACTIVATIONS` that only rows of a table have, while they are swapped: no cut of a model's activations."""
