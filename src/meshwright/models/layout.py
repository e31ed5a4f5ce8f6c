"""What a model asks of whoever runs it: where its arrays lie, and the parts whose algorithm depends on that.

A model names the axes of its arrays (`"batch"`, `"time"`, `"heads"`, ...) and knows nothing of devices. An engine that
spreads the arrays over a mesh gives its own `Layout` with `use_layout`, around the trace of what it compiles.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from meshwright.models.gradients import Scoring
    from meshwright.models.moe import ExpertKernels


class Layout:
    """One device: everything is there, in order."""

    fuse_linear = True
    """Whether several linear maps of one input are best made one."""

    fused_attention = True
    """Whether attention may go through cuDNN's fused kernels."""
    on_mesh = False
    """Whether arrays may lie cut along a mesh."""
    whole_vocab = True
    """Whether each device scores all of the vocabulary."""

    def place(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """`x`, lying as its axes' names ask.

        Arguments:
            x: an activation.
            axes: a name for each of its axes; None: no wish.
        """
        return x

    def gather(self, params: Any, dtype: Any) -> Any:
        """Parameters of a layer (`nnx.State`), as the layer needs them to compute in this type."""
        return params

    def gather_kernel(self, kernel_DV: jax.Array, dtype: Any) -> jax.Array:
        """The head's kernel, `[D, V]`, as scores in this type need it."""
        return kernel_DV

    def gather_rows(self, dx: jax.Array, tokens: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
        """The gradient of the rows `tokens` of a table of so many, lying as they are best added up."""
        return dx, tokens

    def order_T(self, time: int) -> jax.Array:
        """Which place in the sequence each column of a batch holds, `[T]`; a layout may keep them in another order."""
        return jnp.arange(time)

    def to_columns(self, x: jax.Array, axis: int) -> jax.Array:
        """`x`, of which an axis goes by place in the sequence, with that axis in the order of the columns."""
        return x

    def kv_copies(self, kv_heads: int) -> int:
        """How many copies of each key-value head attention should be given."""
        return 1

    def attention(
        self,
        q_BTHC: jax.Array,
        k_BTKC: jax.Array,
        v_BTKE: jax.Array,
        segments_BT: jax.Array | None,
        window: jax.Array | int | None,
        scoring: "Scoring",
    ) -> jax.Array:
        """Causal softmax attention within a sequence, `[B, T, H, E]`; see `meshwright.models.attention`."""
        from meshwright.models.attention import whole_attention

        return whole_attention(q_BTHC, k_BTKC, v_BTKE, segments_BT, window, scoring)

    def on_one_device(self) -> bool:
        """Whether what is traced here is what one device does with arrays that it holds."""
        return True

    def rows_are_whole(self, batch: int) -> bool:
        """Whether `by_rows` may be called with arrays of that batch."""
        return True

    def by_rows(self, f: Callable[..., Any], rows: tuple[jax.Array, ...], whole: tuple[jax.Array, ...]) -> Any:
        """`f(*rows, *whole)` on each device, for what it holds; it isn't differentiated.

        Arguments:
            f: takes and returns arrays whose first axis goes by examples, or by parts of what a device holds.
            rows: `[B, ...]`, whole but for the first axis.
            whole: the same everywhere.
        """
        return f(*rows, *whole)

    def experts(
        self, x_BTD: jax.Array, chosen_BTJ: jax.Array, gates_BTJ: jax.Array, kernels: "ExpertKernels"
    ) -> jax.Array:
        """Each token through the experts chosen for it, weighed and summed; see `meshwright.models.moe`."""
        from meshwright.models.moe import whole_experts

        return whole_experts(x_BTD, chosen_BTJ, gates_BTJ, kernels)

    def by_sequence(self, f: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """`f(*arrays)`, where `f` works on each sequence by itself.

        Arguments:
            f: takes and returns arrays `[B, ...]`.
            arrays: of floating point, each with its whole sequences at hand.
        """
        return f(*arrays)


_layout: ContextVar[Layout] = ContextVar("layout", default=Layout())  # noqa: B039  (it has no state)


def layout() -> Layout:
    """The layout in force."""
    return _layout.get()


@contextmanager
def use_layout(new: Layout) -> Iterator[None]:
    """Put a layout in force while a function is traced."""
    token = _layout.set(new)
    try:
        yield
    finally:
        _layout.reset(token)
