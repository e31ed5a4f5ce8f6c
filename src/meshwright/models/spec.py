"""What a decoder is: the numbers and choices from which `decoder.py` builds it. Imports no framework."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from meshwright.errors import UserError, closest


class ModelSpec(BaseModel):
    """The architecture of one decoder.

    Sizes are counts, not bytes. `kv_heads = 0` means as many as `heads`; `head_width = 0` means `width / heads`;
    `vocab_size = 0` means the tokenizer's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    family: Literal["gpt2", "minigpt", "llama", "mixtral", "deepseek"] = "gpt2"
    """The family that the model belongs to; changes nothing by itself today."""
    vocab_size: int = Field(0, ge=0)
    """Size of the vocabulary; 0: the tokenizer's. A larger one pads the table."""
    context_length: PositiveInt = 1024
    """The most tokens that the model can look at."""
    layers: PositiveInt = 12
    """Blocks, one above the other."""
    width: PositiveInt = 768
    """Width of the residual stream."""
    heads: PositiveInt = 12
    """Attention heads."""
    kv_heads: int = Field(0, ge=0)
    """Heads of keys and values; must divide `heads`. 0: as many as `heads`."""
    head_width: int = Field(0, ge=0)
    """Width of a head; 0: `width / heads`. Under latent attention, of the part that isn't rotated."""
    attention: Literal["heads", "latent"] = "heads"
    """`heads`: keys and values a head. `latent`: all heads' keys and values come from one latent vector a token."""
    kv_latent: int = Field(0, ge=0)
    """Width of the latent vector of keys and values, which decoding caches; for `attention = "latent"`."""
    query_latent: int = Field(0, ge=0)
    """Width of the latent vector of queries; 0: queries are made from the residual stream."""
    rotary_width: int = Field(0, ge=0)
    """Width of a head's rotated part; its key is one for all heads. For `attention = "latent"`."""
    value_width: int = Field(0, ge=0)
    """Width of a head's values under latent attention; 0: as `head_width`."""
    ffn_width: PositiveInt = 3072
    """Inner width of the feed-forward part; of each expert, where there are experts."""
    experts: int = Field(0, ge=0)
    """Experts of a layer, of which a router chooses some for each token; 0: one feed-forward part for all tokens."""
    experts_per_token: PositiveInt = 2
    """How many experts the router chooses for a token."""
    shared_experts: int = Field(0, ge=0)
    """Experts that every token passes besides; together one feed-forward part of that many times `ffn_width`."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's scores become weights: shares over all experts, or each on its own."""
    renormalize: bool = True
    """Whether the weights of the experts chosen are made to sum to 1."""
    capacity_factor: float = Field(0.0, ge=0)
    """Room of an expert in each sequence, in multiples of its fair share; what is beyond is dropped. 0: no limit."""
    balance_loss: float = Field(0.01, ge=0)
    """Weight of the loss that spreads the tokens of each sequence over the experts."""
    router_z_loss: float = Field(0.001, ge=0)
    """Weight of the loss that keeps the router's scores small."""
    positions: Literal["learned", "rotary"] = "learned"
    """How a token's place is told."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the wavelengths of rotary positions."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of the norms."""
    norm_placement: Literal["pre", "post"] = "pre"
    """`pre`: `x + f(norm(x))`. `post`: `norm(x + f(x))`."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in a norm."""
    activation: Literal["gelu", "relu", "swiglu"] = "gelu"
    """Of the feed-forward part; `swiglu` has a gate besides."""
    bias: bool = True
    """Whether the linear maps of the blocks have biases."""
    head_bias: bool = False
    """Whether the output head has a bias; needs `tied_embeddings = false`."""
    tied_embeddings: bool = True
    """Whether the output head is the embedding table."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of activations that training zeroes."""

    @model_validator(mode="before")
    @classmethod
    def _fill_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        width, heads = filled.get("width", 768), filled.get("heads", 12)
        if not filled.get("kv_heads") and _is_count(heads):
            filled["kv_heads"] = heads
        if not filled.get("head_width") and _is_count(width) and _is_count(heads):
            filled["head_width"] = width // heads if width % heads == 0 else 0
        return filled

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.head_width == 0:
            raise ValueError(
                f"heads = {self.heads} must divide width = {self.width}; set heads to one of "
                f"{_divisors_near(self.width, self.heads)}, or set head_width"
            )
        if self.heads % self.kv_heads:
            fits = _divisors_near(self.heads, self.kv_heads)
            raise ValueError(f"kv_heads = {self.kv_heads} must divide heads = {self.heads}; set it to one of {fits}")
        if self.attention == "latent":
            self._check_latent()
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} must not exceed experts = {self.experts}; choose fewer"
            )
        if self.attention == "heads" and self.positions == "rotary" and self.head_width % 2:
            raise ValueError(f"head_width = {self.head_width} must be even for rotary positions; change width or heads")
        if self.tied_embeddings and self.head_bias:
            raise ValueError("head_bias = true needs tied_embeddings = false: a tied head is the embedding table alone")
        return self

    def _check_latent(self) -> None:
        if not self.kv_latent or not self.rotary_width or self.rotary_width % 2:
            raise ValueError(
                f'attention = "latent" needs kv_latent > 0 and an even rotary_width > 0; they are {self.kv_latent} '
                f"and {self.rotary_width}"
            )
        if self.positions != "rotary" or self.kv_heads != self.heads or self.bias:
            raise ValueError(
                'attention = "latent" needs positions = "rotary", kv_heads = heads and bias = false; they are '
                f"{self.positions!r}, {self.kv_heads} (of {self.heads}) and {str(self.bias).lower()}"
            )


def _divisors_near(number: int, wanted: int) -> list[int]:
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return sorted(sorted(divisors, key=lambda size: abs(size - wanted))[:6])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def preset(name: str) -> ModelSpec:
    """The spec that a preset name stands for.

    Arguments:
        name: such as `gpt2` or `llama-135m`.

    Raises:
        UserError: there is no preset of that name.
    """
    known = presets()
    if name not in known:
        raise UserError(f"model.preset = {name!r}: no such preset{closest(name, list(known))}")
    return known[name]


def presets() -> dict[str, ModelSpec]:
    """Every preset of every family, by name."""
    from meshwright.models import deepseek, gpt2, llama, minigpt, mixtral

    return {**gpt2.PRESETS, **minigpt.PRESETS, **llama.PRESETS, **mixtral.PRESETS, **deepseek.PRESETS}
