"""What a decoder is: the numbers and choices from which `decoder.py` builds it. Imports no framework."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from meshwright.errors import UserError, closest

ANY = "transformers"
"""The family of what is none of Meshwright's own: a model just as `transformers` has it."""


class ModelSpec(BaseModel):
    """The architecture of one decoder.

    Sizes are counts, not bytes. `kv_heads = 0` means as many as `heads`; `head_width = 0` means `width / heads`;
    `vocab_size = 0` means the tokenizer's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    family: Literal[
        "gpt2",
        "minigpt",
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma2",
        "gemma3",
        "mixtral",
        "qwen3_moe",
        "deepseek",
        "olmo2",
        "transformers",
    ] = "gpt2"
    """The family that the model belongs to, which says how a checkpoint of it is written and read. `transformers`: any
    causal language model of that library, for `engine = "torch"`."""
    config: str = ""
    """A model by its `config.json`, with random parameters: `hf:<folder or name>`. Of the family `transformers` the
    resolved run file has the whole of it here, as JSON."""
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
    qkv_bias: bool = False
    """Whether the maps to queries, keys and values have biases where the others, by `bias`, have none."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """Norm of queries and keys before rotation: of each head, or of all heads together."""
    attention_scale: float = Field(0.0, ge=0)
    """What scores are multiplied by; 0: one over the root of the head's width."""
    attention_softcap: float = Field(0.0, ge=0)
    """Bound c of the scores, as c tanh(score / c); 0: none."""
    window: int = Field(0, ge=0)
    """How many tokens a token sees, itself included; 0: all before it."""
    global_every: int = Field(0, ge=0)
    """Each so many layers, the last of them sees all whatever `window` is; 0: none does."""
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
    dense_layers: int = Field(0, ge=0)
    """How many of the first layers have one feed-forward part in place of experts."""
    dense_ffn_width: int = Field(0, ge=0)
    """Inner width of the feed-forward part of those layers."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    """How the router's scores become weights: shares over all experts, or each on its own."""
    router_bias: bool = False
    """Whether a correction, which no gradient reaches, is added to the scores by which experts are chosen."""
    router_groups: PositiveInt = 1
    """Groups that the experts are cut into; a token's experts come from the best of them alone."""
    router_groups_used: PositiveInt = 1
    """How many groups a token's experts come from."""
    router_group_score: Literal["max", "top2"] = "max"
    """What a group is judged by: its best score, or the sum of its two best."""
    router_scale: PositiveFloat = 1.0
    """What the weights of the experts chosen are multiplied by."""
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
    local_rope_theta: float = Field(0.0, ge=0)
    """That base in layers with a window, whose positions aren't scaled then; 0: as in the others."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """How rotary positions are stretched beyond the length that the model was first trained on."""
    rope_factor: PositiveFloat = 1.0
    """How far."""
    rope_original_length: int = Field(0, ge=0)
    """That length; for `llama3` and `yarn`."""
    rope_low_frequency: PositiveFloat = 1.0
    """Waves longer than the original length over this are stretched by the whole factor; for `llama3`."""
    rope_high_frequency: PositiveFloat = 4.0
    """Waves shorter than the original length over this aren't stretched; for `llama3`."""
    rope_beta_fast: PositiveFloat = 32.0
    """Turns within the original length from which waves aren't stretched; for `yarn`."""
    rope_beta_slow: PositiveFloat = 1.0
    """Turns within the original length up to which waves are stretched by the whole factor; for `yarn`."""
    rope_mscale: float = Field(0.0, ge=0)
    """Of `yarn`: how much rotated queries and keys grow with the factor."""
    rope_mscale_all: float = Field(0.0, ge=0)
    """Of `yarn`: how much of that is taken back; and under latent attention, how much the scores' scale grows."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Kind of the norms."""
    norm_placement: Literal["pre", "post", "both", "after"] = "pre"
    """`pre`: `x + f(norm(x))`. `post`: `norm(x + f(x))`. `both`: `x + norm(f(norm(x)))`. `after`: `x + norm(f(x))`."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in a norm."""
    activation: Literal["gelu", "relu", "swiglu", "geglu"] = "gelu"
    """Of the feed-forward part; `swiglu` and `geglu` have a gate besides."""
    bias: bool = True
    """Whether the linear maps of the blocks have biases."""
    head_bias: bool = False
    """Whether the output head has a bias; needs `tied_embeddings = false`."""
    embedding_scale: PositiveFloat = 1.0
    """What embeddings are multiplied by."""
    final_softcap: float = Field(0.0, ge=0)
    """Bound c of the scores of the next token, as c tanh(score / c); 0: none."""
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
        if filled.get("value_width") and filled["value_width"] == filled.get("head_width"):
            filled["value_width"] = 0
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
        for key in ("kv_latent", "query_latent", "rotary_width", "value_width"):
            if self.attention != "latent" and getattr(self, key):
                raise ValueError(f'{key} = {getattr(self, key)} needs attention = "latent"; set that, or {key} = 0')
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} must not exceed experts = {self.experts}; choose fewer"
            )
        if (self.family == ANY) != bool(self.config):
            raise ValueError(
                f'family = "{self.family}" {"needs" if self.family == ANY else "has no"} config; name a folder or a '
                "model as model.config or model.init, as hf:<folder or name>"
            )
        if self.attention == "heads" and self.positions == "rotary" and self.head_width % 2 and self.family != ANY:
            raise ValueError(f"head_width = {self.head_width} must be even for rotary positions; change width or heads")
        if self.tied_embeddings and self.head_bias:
            raise ValueError("head_bias = true needs tied_embeddings = false: a tied head is the embedding table alone")
        self._check_positions()
        self._check_windows()
        self._check_experts()
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
        for key in ("qkv_bias", "qk_norm", "attention_scale", "attention_softcap", "window"):
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f'{key} = {getattr(self, key)!r} needs attention = "heads"; leave it out')

    def _check_positions(self) -> None:
        if self.rope_scaling != "none" and self.positions != "rotary":
            raise ValueError(f'rope_scaling = {self.rope_scaling!r} needs positions = "rotary"; it is "learned"')
        if self.rope_scaling == "none" and self.rope_factor != 1.0:
            raise ValueError(f"rope_factor = {self.rope_factor} needs a rope_scaling; choose one, or set it to 1")
        if self.rope_scaling == "yarn" and self.rope_theta <= 1.0:
            raise ValueError(f'rope_theta = {self.rope_theta} must be over 1 for rope_scaling = "yarn"')
        if self.rope_scaling in ("llama3", "yarn") and not self.rope_original_length:
            raise ValueError(f"rope_scaling = {self.rope_scaling!r} needs rope_original_length > 0; set it")
        if self.rope_scaling == "llama3" and self.rope_high_frequency <= self.rope_low_frequency:
            raise ValueError(
                f"rope_high_frequency = {self.rope_high_frequency} must exceed rope_low_frequency = "
                f"{self.rope_low_frequency}; change one of them"
            )
        if bool(self.rope_mscale) != bool(self.rope_mscale_all):
            raise ValueError(
                "rope_mscale and rope_mscale_all go together; they are "
                f"{self.rope_mscale} and {self.rope_mscale_all}: set both or none"
            )

    def _check_windows(self) -> None:
        if self.global_every and not self.window:
            raise ValueError(f"global_every = {self.global_every} needs window > 0; set window, or leave it out")
        if self.local_rope_theta and not (self.window and self.positions == "rotary"):
            raise ValueError(
                f'local_rope_theta = {self.local_rope_theta} needs window > 0 and positions = "rotary"; leave it out'
            )

    def _check_experts(self) -> None:
        for key in ("shared_experts", "capacity_factor"):
            if not self.experts and getattr(self, key):
                raise ValueError(f"{key} = {getattr(self, key)} needs experts > 0; set experts, or {key} = 0")
        if self.experts and self.activation == "geglu":
            raise ValueError('activation = "geglu" is of models without experts; choose swiglu')
        if self.dense_layers and not (self.experts and self.dense_ffn_width and self.dense_layers < self.layers):
            raise ValueError(
                f"dense_layers = {self.dense_layers} must be fewer than layers = {self.layers}, and needs experts > 0 "
                f"and dense_ffn_width > 0; they are {self.experts} and {self.dense_ffn_width}"
            )
        if self.router_groups == 1:
            return
        if self.experts % self.router_groups or self.router_groups_used > self.router_groups:
            raise ValueError(
                f"router_groups = {self.router_groups} must divide experts = {self.experts}, and be no fewer than "
                f"router_groups_used = {self.router_groups_used}; change one of them"
            )
        if self.router_group_score == "top2" and self.experts < 2 * self.router_groups:
            raise ValueError(
                f'router_group_score = "top2" needs two experts in each of router_groups = {self.router_groups}; there '
                f"are {self.experts}: choose max, or fewer groups"
            )
        most = self.experts // self.router_groups * self.router_groups_used
        if self.experts_per_token > most:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} must not exceed the {most} experts of the groups that a "
                "token uses; choose fewer, or raise router_groups_used"
            )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part has a gate."""
        return self.activation in ("swiglu", "geglu")

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """How many tokens a token sees in each layer, itself included; 0: all before it."""
        every = self.global_every
        return tuple(0 if every and (layer + 1) % every == 0 else self.window for layer in range(self.layers))


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
    from importlib import import_module
    from typing import get_args

    families = get_args(ModelSpec.model_fields["family"].annotation)
    modules = (import_module(f"meshwright.models.{family}") for family in families if family != ANY)
    return {name: spec for module in modules for name, spec in module.PRESETS.items()}
