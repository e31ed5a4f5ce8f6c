"""Where a pipeline of several rounds stores the layers out of order: what that concerns, and how an own optimizer is
spared it."""

from typing import Any

import jax
import numpy as np
import optax


def is_reordered(path: tuple) -> bool:
    """Whether a leaf of a state, at such a path, has the layers on its first axis."""
    return any(getattr(part, "key", None) == "blocks" for part in path)


def with_layers_in_order(
    optimizer: optax.GradientTransformation, order_L: tuple[int, ...]
) -> optax.GradientTransformation:
    """The same update rule, which finds the layers in order: its rates may go by layer.

    What it keeps is stored as the parameters are. Layers are sent between stages for it, at each update.

    Arguments:
        optimizer: of nested dictionaries of parameters; the layers' are stacked under `blocks`.
        order_L: which layer lies at each place.
    """
    stored_L, ordered_L = np.array(order_L), np.argsort(order_L)

    def taken(tree: Any, places_L: np.ndarray) -> Any:
        def take(path: tuple, leaf: Any) -> Any:
            return leaf[places_L] if is_reordered(path) and leaf.shape[:1] == places_L.shape else leaf

        return jax.tree_util.tree_map_with_path(take, tree)

    def init(params: Any) -> Any:
        return taken(optimizer.init(taken(params, ordered_L)), stored_L)

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(*(taken(tree, ordered_L) for tree in (gradients, state, params)))
        return taken(updates, stored_L), taken(state, stored_L)

    return optax.GradientTransformation(init, update)
