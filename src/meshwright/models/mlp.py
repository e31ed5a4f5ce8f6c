"""The feed-forward half of a block. Shapes: B batch, T time, D width, F feed-forward width."""

import jax
from flax import nnx

from meshwright.models import kernels
from meshwright.models.gradients import gelu, gelu_of_sum
from meshwright.models.layers import Linear, fused_linear
from meshwright.models.layout import layout
from meshwright.models.spec import ModelSpec


class MLP(nnx.Module):
    """`down(activation(up(x)))`; with a gate, `down(activation(gate(x)) * up(x))` (Shazeer, 2020), the activation being
    SiLU for `swiglu` and GELU for `geglu`."""

    def __init__(self, spec: ModelSpec, ffn_width: int, *, std: float, out_std: float, rngs: nnx.Rngs):
        def widen() -> Linear:
            return Linear(spec.width, ffn_width, ("width", "ffn"), bias=spec.bias, std=std, rngs=rngs)

        self.gate = widen() if spec.gated else None
        self.up = widen()
        self.down = Linear(ffn_width, spec.width, ("ffn", "width"), bias=spec.bias, std=out_std, rngs=rngs)
        self.activation = spec.activation

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.gate is not None:
            gate_BTF, up_BTF = fused_linear(x_BTD, self.gate, self.up)
            inner_BTF = (gelu if self.activation == "geglu" else jax.nn.silu)(gate_BTF) * up_BTF
        elif self.activation == "gelu" and self.up.bias is not None and kernels.applies(x_BTD):
            inner_BTF = gelu_of_sum(self.up.product(x_BTD), self.up.bias[...])
        else:
            up_BTF = self.up(x_BTD)
            inner_BTF = jax.nn.relu(up_BTF) if self.activation == "relu" else gelu(up_BTF)
        return self.down(layout().place(inner_BTF, "batch", "time", "ffn"))
