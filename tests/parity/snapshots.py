"""How each parameter lies on six meshes, as text: a change of layout is a readable diff.

python tests/parity/snapshots.py     writes the snapshots anew
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

FOLDER = Path(__file__).parent / "snapshots"
MESHES = {
    "llama-tiny": [{"data": 8}, {"fsdp": 8}, {"tensor": 2, "data": 4}, {"pipeline": 2, "tensor": 4}],
    "deepseek-tiny": [{"expert": 4, "fsdp": 2}, {"data": 2, "pipeline": 2, "tensor": 2}],
}


def snapshots() -> dict[str, str]:
    """File name to text."""
    return {
        f"{preset}-{'-'.join(f'{axis}{size}' for axis, size in mesh.items())}.txt": text(preset, mesh)
        for preset, meshes in MESHES.items()
        for mesh in meshes
    }


def text(preset_name: str, mesh: dict[str, int]) -> str:
    """A line for each parameter: name, shape, the mesh axes along each of its axes, and the shape of a shard."""
    import jax
    from flax import nnx

    from meshwright.config_train import MESH_AXES
    from meshwright.engines.jax.sharding import axes_of, specs_of
    from meshwright.models.decoder import Decoder
    from meshwright.models.spec import preset

    spec = preset(preset_name).model_copy(update={"vocab_size": 4096})
    sizes = dict.fromkeys(MESH_AXES, 1) | mesh
    state = nnx.state(nnx.eval_shape(lambda: Decoder(spec, rngs=nnx.Rngs(0))), nnx.Param)
    shapes = jax.tree.map(lambda leaf: leaf.shape, nnx.to_pure_dict(state))
    leaves = jax.tree_util.tree_flatten_with_path(shapes, is_leaf=lambda value: isinstance(value, tuple))[0]
    specs = jax.tree.leaves(
        specs_of(axes_of(state), sizes, spec), is_leaf=lambda value: isinstance(value, jax.sharding.PartitionSpec)
    )
    lines = []
    for (path, shape), cut in zip(leaves, specs, strict=True):
        along = [() if axes is None else (axes,) if isinstance(axes, str) else axes for axes in cut]
        shard = [size // math.prod(sizes[axis] for axis in axes) for size, axes in zip(shape, along, strict=True)]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        axes = ", ".join("+".join(axes) or "-" for axes in along)
        lines.append(f"{name:<34} {shape!s:<18} ({axes:<24}) {tuple(shard)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file_name, content in snapshots().items():
        (FOLDER / file_name).write_text(content)
