"""Models whose every parameter matters."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def noisy(make: Callable[[], nnx.Module], seed: int = 0):
    """A module with every parameter random and large enough to matter: zeros and ones would hide a mistake."""
    graph, params = nnx.split(nnx.eval_shape(make), nnx.Param)
    random = np.random.default_rng(seed)

    def fill(path, leaf):
        start = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(start + 0.3 * random.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(graph, jax.tree_util.tree_map_with_path(fill, params))
