"""The sections of a run file on how to train: adapters, mesh, update rule, loop, checkpoints, trackers."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from meshwright.config_base import NonNegativeFloat, Section

MESH_AXES = ("pipeline", "data", "fsdp", "expert", "context", "tensor")
"""The axes of the mesh, the one between the most distant devices first."""


def _mesh_size(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("a positive number, or -1 for all devices that are left")
    return value


Share = Annotated[float, Field(ge=0, lt=1)]
MeshSize = Annotated[int, AfterValidator(_mesh_size)]


class LoraSection(Section):
    """Fine-tuning of low-rank adapters alone (LoRA), beside parameters that stay as `model.init` gives them."""

    rank: NonNegativeInt = 0
    """Rank of the adapters; 0: none, all parameters are trained."""
    alpha: PositiveFloat = 16.0
    """What an adapter gives is multiplied by `alpha / rank`."""
    targets: Annotated[list[str], Field(min_length=1)] = ["all-linear"]
    """The maps that get one, by the ends of their names in the checkpoint, such as `q_proj` or `mlp.*_proj`."""
    rslora: bool = False
    """Whether to multiply by `alpha / sqrt(rank)` instead (rsLoRA)."""
    quantize: Literal["none", "nf4"] = "none"
    """What keeps the layers' linear maps: float32, or 4 bits each number (`nf4`, QLoRA; PyTorch on a GPU)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quantize != "none" and not self.rank:
            raise ValueError(
                f'quantize = "{self.quantize}": numbers in 4 bits aren\'t trained, adapters beside them are; set '
                "lora.rank, or leave it out"
            )
        return self

    @property
    def scale(self) -> float:
        """What an adapter gives is multiplied by this; there must be some."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)


class MeshSection(Section):
    """How devices are laid out."""

    data: MeshSize = -1
    """Replicas of the model, each with its share of the batch. -1 in one of the sizes: all devices that are left."""
    fsdp: MeshSize = 1
    """Shares of the parameters and optimizer state, gathered for use; the batch is shared out too."""
    tensor: MeshSize = 1
    """Shares of heads, feed-forward width and vocabulary."""
    pipeline: MeshSize = 1
    """Stages that the layers are cut into; micro-batches pass through them one behind another."""
    expert: MeshSize = 1
    """Shares of the experts; the batch is shared out too."""
    context: MeshSize = 1
    """Shares of each sequence."""
    pipeline_rounds: PositiveInt = 1
    """How often a micro-batch goes round the stages, each holding so many runs of layers; more: a smaller bubble."""


class OptimizerSection(Section):
    """The update rule."""

    kind: Literal["adamw", "lion", "muon", "schedule_free"] = "adamw"
    """AdamW, Lion, Muon (with AdamW for what isn't a matrix of a block), or schedule-free AdamW."""
    learning_rate: PositiveFloat = 1e-3
    """The peak; the schedule scales it."""
    matrix_learning_rate: PositiveFloat = 0.02
    """Learning rate of the layers' matrices under `muon`; `learning_rate` serves the rest, by AdamW."""
    weight_decay: NonNegativeFloat = 0.1
    """Pull towards zero, on matrices and embeddings only."""
    beta1: Share = 0.9
    """Decay of the mean of gradients (of Muon's matrices it is 0.95)."""
    beta2: Share = 0.95
    """Decay of the mean of squared gradients (of Lion: of its momentum)."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0: no clipping."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "muon" and self.matrix_learning_rate != 0.02:
            raise ValueError(
                f'matrix_learning_rate = {self.matrix_learning_rate:g}: is of kind = "muon", and kind = "{self.kind}"; '
                "leave it out"
            )
        return self


class ScheduleSection(Section):
    """The learning rate over time, as a share of its peak."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: flat, a line or half a cosine to the end, or flat with a final decay (`wsd`)."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises to its peak."""
    decay_steps: NonNegativeInt = 0
    """Steps of the final decay under `wsd`; 0: a fifth of the run."""
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The learning rate at the last step, as a share of the peak."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind != "wsd" and self.decay_steps:
            raise ValueError(
                f'decay_steps = {self.decay_steps}: is of kind = "wsd", and kind = "{self.kind}"; leave it out, or set '
                "it to 0"
            )
        return self


class TrainSection(Section):
    """The loop: how long, how much at a time, how often to look."""

    steps: PositiveInt = 1000
    """Updates in all. May be raised later to train on."""
    batch_size: PositiveInt = 16
    """Sequences in the global batch."""
    micro_batch_size: NonNegativeInt = 0
    """Sequences at a time, whole mesh; gradients accumulate over the batch. 0: the whole batch at once."""
    sequence_length: PositiveInt = 128
    """Tokens of a sequence; at most `model.context_length`."""
    log_every: PositiveInt = 10
    """Steps between training records."""
    eval_every: NonNegativeInt = 100
    """Steps between evaluations, the last step included; 0: never."""
    eval_batches: PositiveInt = 20
    """The most batches an evaluation reads; always the same ones."""
    sample_every: NonNegativeInt = 100
    """Steps between samples, the last step included; 0: never."""
    sample_prompt: str = ""
    """What the samples begin with; empty: the end-of-text token, the start of a document."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do when a loss or a gradient isn't finite: stop, or leave that update out."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of activations; parameters stay float32. `auto`: bfloat16 on an accelerator, float32 on a CPU."""
    float8: bool = False
    """Whether the linear maps of the blocks multiply in float8; JAX, in bfloat16, on GPUs since Ada and Hopper."""
    scan_layers: bool = False
    """One compiled layer in a loop (compiles fast) in place of unrolled ones (run fast)."""
    remat: Literal["none", "full", "products"] = "none"
    """What is computed again in the backward pass, to save memory: nothing, each layer, or all but its products."""
    deterministic: bool = False
    """Whether one GPU gives the same losses to the last bit in each run, and after a resume. CPUs always do."""
    compile_cache: str = "auto"
    """Folder of compiled programs, for the next start; `auto`: the user's cache, for one process on GPUs; or `off`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.float8 and self.compute_dtype == "float32":
            raise ValueError(
                'float8 = true: needs activations in bfloat16, and train.compute_dtype is "float32"; set that to '
                '"bfloat16", or leave float8 out'
            )
        return self


class CheckpointSection(Section):
    """When to save, what to keep."""

    every: NonNegativeInt = 100
    """Steps between saves; the last step is always saved. 0: the last step only."""
    keep: PositiveInt = 2
    """The newest ones to keep; the best by validation loss stays besides."""


def _first_and_last(value: list[int]) -> list[int]:
    if value and (len(value) != 2 or value[0] > value[1]):
        raise ValueError("two steps, the first and the last, such as [20, 25]; or [] for none")
    return value


class ProfileSection(Section):
    """A trace of some steps."""

    steps: Annotated[list[PositiveInt], AfterValidator(_first_and_last)] = []
    """The first and the last step to trace, into `profile/` of the run directory; empty: none."""


class TrackSection(Section):
    """Trackers beside `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    """Whether to write TensorBoard event files too; needs the extra `track`."""
