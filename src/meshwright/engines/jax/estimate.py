"""What a run takes, from shapes alone: parameters, bytes on a device, operations a token. Nothing is allocated.

Exact: parameters, gradients, optimizer state. An estimate: what the forward pass keeps for the backward one, and what
both work with. XLA may keep more, where it works ahead of need, or less, where it makes a thing twice.

Sizes: N tokens of a micro-batch on a device, T sequence length, D width, H heads, K key-value heads, C width of a
head's queries and keys, E of its values, F feed-forward width, V vocabulary, J experts of a token; s bytes of a number.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshwright.config import Run
from meshwright.engines.flops import head_widths, training_flops
from meshwright.engines.jax.mesh import RunMesh, check_mesh, mesh_sizes
from meshwright.engines.jax.pipeline import does_keep_all
from meshwright.engines.jax.rules import ACTIVATIONS, GATHERED
from meshwright.engines.jax.sharding import specs_of
from meshwright.engines.jax.state import StatePlan
from meshwright.engines.jax.step import loss_chunk, scans_layers
from meshwright.models import flash, kernels
from meshwright.models.decoder import active_parameter_count
from meshwright.models.gradients import Scoring
from meshwright.models.layers import joins_linears
from meshwright.models.moe import expert_room
from meshwright.models.spec import ModelSpec
from meshwright.models.stacks import STACKS, layer_specs

_FLOAT32 = 4


@dataclass(frozen=True)
class Estimate:
    """Bytes on one device, by what they hold."""

    parameters: int
    gradients: int
    """Float32; twice where micro-batches come one behind another: the sum, and those of the one at hand."""
    optimizer: int
    activations: int
    """What all layers keep from the forward pass for the backward one."""
    kernels: int
    """Parameters in the form in which they are multiplied: gathered along `fsdp`, or several joined into one."""
    head: int
    """The residual stream at the head, its gradient, and the sum of the head's gradient over chunks of tokens."""
    work: int
    """The backward pass of one layer, or a chunk's scores and their gradient: whichever is more."""

    @property
    def state(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def abstract_mesh(run: Run, spec: ModelSpec, devices: int) -> RunMesh:
    """As `make_run_mesh`, over devices that need not be there; good for shapes and shardings alone.

    Arguments:
        run: a checked run file.
        spec: the architecture.
        devices: how many there are to be.

    Raises:
        UserError: the mesh fits neither the devices nor the model or the batch.
    """
    sizes = mesh_sizes(run, devices)
    check_mesh(run, spec, sizes)
    accumulate = run.train.batch_size // run.micro_batch_size
    if devices == 1:
        return RunMesh(sizes, None, accumulate)
    shape, names = tuple(sizes.values()), tuple(sizes)
    mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
    return RunMesh(sizes, cast(Mesh, mesh), accumulate, run.mesh.pipeline_rounds)


def flops_per_token(spec: ModelSpec, sequence_length: int, adapters: int = 0) -> int:
    """See `meshwright.engines.flops.training_flops`.

    Arguments:
        spec: the architecture, with its vocabulary.
        sequence_length: tokens of a sequence.
        adapters: parameters of adapters; 0: there are none.
    """
    return training_flops(spec, active_parameter_count(spec), sequence_length, adapters)


def human_bytes(count: float) -> str:
    """A number of bytes in GiB, MiB or KiB."""
    for size, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= size:
            return f"{count / size:,.1f} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count / 2**10:,.1f} KiB"


def bytes_of(arrays: Any, shardings: Any = None) -> int:
    """Bytes that abstract arrays take on one device.

    Arguments:
        arrays: any tree of them.
        shardings: how each lies; None: whole.
    """
    return sum(leaf.dtype.itemsize * size for leaf, size in _sizes(arrays, shardings))


def count_of(arrays: Any, shardings: Any = None) -> int:
    """Numbers on one device; arguments as in `bytes_of`."""
    return sum(size for _, size in _sizes(arrays, shardings))


def _sizes(arrays: Any, shardings: Any) -> Iterator[tuple[Any, int]]:
    leaves = jax.tree.leaves(arrays)
    if shardings is None:
        yield from ((leaf, leaf.size) for leaf in leaves)
        return
    for leaf, sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        yield leaf, math.prod(sharding.shard_shape(leaf.shape))


def estimate(run: Run, spec: ModelSpec, run_mesh: RunMesh, state: StatePlan, dtype: jnp.dtype) -> Estimate:
    """Bytes that training takes on one device.

    Arguments:
        run: its batch sizes, sequence length, `train.remat` and the pipeline's rounds matter.
        spec: the architecture, with its vocabulary.
        run_mesh: the mesh, of devices or abstract.
        state: the plan of the state on that mesh.
        dtype: the type that activations are computed in.
    """
    shapes, shardings = state.shapes, state.shardings
    parameters = bytes_of(shapes.params, shardings and shardings.params)
    optimizer = bytes_of((shapes.step, shapes.optimizer), shardings and (shardings.step, shardings.optimizer))
    gradients = _gradients(run_mesh, state)
    share = _share(run, spec, run_mesh.sizes, dtype)
    activations, layer_work = _activations(run, spec, run_mesh, share)
    head, chunk_work = _loss(run, spec, run_mesh, share)
    return Estimate(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        kernels=_kernels(run, spec, run_mesh, state, share),
        head=head,
        work=max(layer_work, chunk_work),
    )


def _gradients(run_mesh: RunMesh, state: StatePlan) -> int:
    trained, shardings = state.trained.of(state.shapes.params), state.shardings
    laid = shardings and state.trained.of(shardings.params)
    size = {part: _FLOAT32 * count_of(leaves, laid and laid[part]) for part, leaves in trained.items()}
    if run_mesh.accumulate == 1:
        return sum(size.values())
    twice = size if run_mesh.sizes["pipeline"] == 1 else {"blocks"}  # elsewhere a pipeline takes micro-batches at once
    return sum(many * (2 if part in twice else 1) for part, many in size.items())


class Share(NamedTuple):
    """What one device has of a micro-batch and of a layer's inner widths."""

    tokens: int
    """N."""
    time: int
    """T, of the whole sequence."""
    number: int
    """s, bytes of an activation."""
    tensor: int
    """Devices that share the widths of a layer."""
    experts: int
    """Devices that share its experts."""
    flash: bool
    """Whether attention keeps no weights: round a ring, where sequences are cut, or by a fused kernel."""
    value_width: int
    """E, of a head's values and outputs as attention keeps them."""


def _share(run: Run, spec: ModelSpec, sizes: dict[str, int], dtype: jnp.dtype) -> Share:
    rows = run.micro_batch_size // math.prod(sizes[axis] for axis in ACTIVATIONS["batch"])
    time = run.train.sequence_length
    widths = head_widths(spec)
    is_fused = sizes["context"] == 1 and _is_fused(run, spec, sizes, dtype)
    return Share(
        tokens=rows * time // sizes["context"],
        time=time,
        number=jnp.dtype(dtype).itemsize,
        tensor=sizes["tensor"],
        experts=sizes["expert"],
        flash=sizes["context"] > 1 or is_fused,
        value_width=flash.kernel_width(*widths) if is_fused else widths[1],
    )


def _is_fused(run: Run, spec: ModelSpec, sizes: dict[str, int], dtype: jnp.dtype) -> bool:
    """Whether `meshwright.models.flash` has kernels, on a device like those here, for the attention of all layers."""
    is_traced = spec.window and (scans_layers(run) or sizes["pipeline"] > 1)  # then a layer doesn't know its window
    if is_traced or (run.train.deterministic and spec.dense_layers):
        return False
    key_width, value_width = head_widths(spec)

    def of_heads(heads: int, width: int) -> Any:
        return jax.ShapeDtypeStruct((1, run.train.sequence_length, heads, width), dtype)

    q, k, v = of_heads(spec.heads, key_width), of_heads(spec.kv_heads, key_width), of_heads(spec.kv_heads, value_width)
    scoring = Scoring(key_width**-0.5, spec.attention_softcap)
    windows = set(spec.layer_windows) if spec.window else {0}
    return all(flash.applies(q, k, v, None, window or None, scoring) for window in windows)


def layer_bytes(spec: ModelSpec, share: Share, remat: str) -> float:
    """Bytes that one layer keeps for the backward pass, for each token of a device.

    The sum of what the gradients of `meshwright.models` keep, in numbers a token, s bytes each unless said otherwise:

    - the residual stream where each norm reads it, and what each norm makes: 4 D; 6 D with norms on both sides
      (and float32 statistics of the norms: 2 each for LayerNorm, 1 for RMSNorm);
    - attention: queries H C, keys K C, values K E, the output H E twice (once for its own gradient, once as the input
      of the last product), and the weights H T; in a ring or a fused kernel just their log-sum-exp, H float32. Where
      keys are wider than values, a fused kernel's values and its output are as wide as they. With dropout also the
      weights before it, in float32, and a byte of mask for each. Norms of queries and keys keep these once more, and a
      bound of the scores its slope, H T in float32;
    - latent attention: the latent vectors before and after their norms besides;
    - feed-forward: 2 F for GELU, F and a byte of mask each for ReLU; for SwiGLU 6 F: both products, the sigmoid, its
      derivative, SiLU, and what goes into the last product; for GeGLU 4 F, which has no sigmoid;
    - experts: for each of a token's J choices its input D, the products of the kernels inward, and its output D in
      float32; and the router's input in float32;
    - dropout: 2 D bytes of masks.

    All of it is cut along `tensor`: the residual stream by tokens, the rest by heads and inner widths. `full` keeps the
    residual stream at the start of the layer alone, D. `products` keeps that and the results of matrix products.

    Compare Korthikanti et al., 2022 ("Reducing Activation Recomputation"): 34 D + 5 H T bytes, in bfloat16 with
    dropout, where ours are 2 (21 D + H T) without.

    Arguments:
        spec: the architecture.
        share: what the device has of it.
        remat: as in the run file.
    """
    stream = spec.width * share.number / share.tensor
    if remat == "full":
        return stream
    parts = (_attention_bytes(spec, share), _feed_forward_bytes(spec, share))
    if remat == "products":
        return stream + sum(part.products for part in parts)
    statistics = 2 * _FLOAT32 * (2 if spec.norm == "layernorm" else 1) / share.tensor
    masks = 2 * spec.width / share.tensor if spec.dropout else 0
    norms = 2 if spec.norm_placement == "both" else 1
    return (2 + 2 * norms) * stream + norms * statistics + masks + sum(part.kept for part in parts)


class _Part(NamedTuple):
    kept: float
    """Without remat; inputs left out."""
    products: float
    """Under `products`."""


def _attention_bytes(spec: ModelSpec, share: Share) -> _Part:
    key_width, value_width = head_widths(spec)
    heads, kv_heads = spec.heads / share.tensor, math.lcm(spec.kv_heads, share.tensor) / share.tensor
    queries, keys, values = heads * key_width, kv_heads * key_width, kv_heads * value_width
    latent = spec.attention == "latent"
    latents = (spec.query_latent + spec.kv_latent) / share.tensor if latent else 0
    if spec.dropout:
        weights = heads * share.time * (share.number + _FLOAT32 + 1)
    elif share.flash:
        weights = heads * _FLOAT32
    else:
        weights = heads * share.time * share.number
    kept = queries + keys + kv_heads * share.value_width + heads * (share.value_width + value_width) + 2 * latents
    if spec.attention_softcap:
        weights += 0 if share.flash else heads * share.time * _FLOAT32
    if spec.qk_norm != "none":
        kept += queries + keys
        weights += _FLOAT32 * (heads + kv_heads if spec.qk_norm == "head" else 2)
    products = queries + keys + values + latents + spec.width / share.tensor
    if latent:  # the rotated part of the keys is one for all heads
        products -= (heads - 1 / share.tensor) * spec.rotary_width
    return _Part(kept * share.number + weights, products * share.number)


def _feed_forward_bytes(spec: ModelSpec, share: Share) -> _Part:
    after = spec.width * share.number / share.tensor if spec.norm_placement != "pre" else 0
    if not spec.experts:
        part = _mlp_bytes(spec, share, spec.ffn_width)
        return _Part(part.kept, part.products + after)
    shared = _mlp_bytes(spec, share, spec.shared_experts * spec.ffn_width)
    routed = _experts_bytes(spec, share)
    return _Part(shared.kept + routed.kept, shared.products + routed.products + after)


def _mlp_bytes(spec: ModelSpec, share: Share, width: int) -> _Part:
    inner = width / share.tensor
    number = share.number
    kept = {"gelu": 2 * number, "relu": number + 1, "swiglu": 6 * number, "geglu": 4 * number}
    return _Part(inner * kept[spec.activation], inner * _inward(spec) * share.number)


def _experts_bytes(spec: ModelSpec, share: Share) -> _Part:
    choices, experts_here = min(spec.experts_per_token, spec.experts), spec.experts / share.experts
    outputs, router_input = choices * spec.width * _FLOAT32, 0
    if share.number != _FLOAT32:  # beside what the norm made where that is needed too, else in its place
        router_input = spec.width * (_FLOAT32 if spec.shared_experts else _FLOAT32 - share.number)
    if spec.capacity_factor:
        rows = expert_room(spec, share.time) * spec.experts / share.time
        inner = _mlp_bytes(spec, share, spec.ffn_width)
    else:
        # Each of the devices that share the experts may send all its tokens to this one.
        rows = choices if share.experts == 1 else share.experts * min(choices, experts_here)
        products = _inward(spec) * spec.ffn_width * share.number / share.tensor
        inner = _Part(products, products)
    kept = rows * (spec.width * share.number + inner.kept) + outputs + router_input
    return _Part(kept, rows * inner.products + choices * spec.width * share.number)


def _inward(spec: ModelSpec) -> int:
    return 2 if spec.gated else 1


def _activations(run: Run, spec: ModelSpec, run_mesh: RunMesh, share: Share) -> tuple[int, int]:
    """What is kept for the backward pass, and what the backward pass of a layer works with.

    A layer works with what it keeps without remat, gradients taking the place of what they are the gradients of, and
    with four times the residual stream, uncut; with dropout also with random numbers, 32 bytes for each weight.

    In a pipeline each tick keeps the residual stream, and each micro-batch besides, where it goes in and where it comes
    out. Where a stage's work is done again in the backward pass, that is all, and what the layers of one tick keep is
    work; elsewhere each tick keeps that.
    """
    kept_L = [share.tokens * layer_bytes(one, share, run.train.remat) for one in layer_specs(spec)]
    most = max(layer_bytes(one, share, "none") for one in layer_specs(spec))
    random = 32 * spec.heads / share.tensor * share.time if spec.dropout else 0
    work = share.tokens * (most + 4 * spec.width * share.number + random)
    stages = run_mesh.sizes["pipeline"]
    if stages == 1:
        return math.ceil(sum(kept_L)), math.ceil(work)
    ticks = run_mesh.accumulate * run_mesh.rounds + stages - 1
    passed_on = (ticks + 2 * run_mesh.accumulate) * share.tokens * spec.width * share.number
    of_tick = sum(kept_L[: _layers_at_a_time(spec, run_mesh)])
    if does_keep_all(run.train.remat, run_mesh.rounds, scans_layers(run)):
        return math.ceil(passed_on + ticks * of_tick), math.ceil(work)
    return passed_on, math.ceil(of_tick + work)


def _layers_at_a_time(spec: ModelSpec, run_mesh: RunMesh) -> int:
    return spec.layers // (run_mesh.sizes["pipeline"] * run_mesh.rounds)


def _loss(run: Run, spec: ModelSpec, run_mesh: RunMesh, share: Share) -> tuple[int, int]:
    """The head's part and a chunk's work: `2 N D s`, trained `+ 4 D V`, and for a chunk of c tokens `8 c V`; where a
    kernel takes scores up in half precision, `4 * 2 c V`, and twice the head in 16 bits, `4 D V`."""
    sizes = run_mesh.sizes
    tokens, vocab = share.tokens, -(-spec.vocab_size // share.tensor)
    if sizes["pipeline"] > 1:
        time_shares = run_mesh.loss_shares(run)[1] // sizes["context"]
        tokens = run_mesh.accumulate * share.tokens // time_shares
    head = 2 * tokens * spec.width * share.number + (0 if run.lora.rank else _FLOAT32 * spec.width * vocab)
    chunk = loss_chunk(spec.vocab_size)
    is_whole = all(size == 1 for axis, size in sizes.items() if axis not in ACTIVATIONS["batch"])
    by_kernel = is_whole and kernels.capability() >= kernels.LEAST_CAPABILITY and share.number < _FLOAT32
    if by_kernel and not spec.head_bias and not spec.final_softcap:
        return head, 4 * (min(2 * chunk, tokens) + spec.width) * vocab
    return head, 2 * _FLOAT32 * min(chunk, tokens) * vocab


def _kernels(run: Run, spec: ModelSpec, run_mesh: RunMesh, state: StatePlan, share: Share) -> int:
    """Float32 parameters as they are multiplied.

    Along `fsdp` each layer is gathered, and kept for the backward pass unless remat has it gathered again; the tables
    and the head are gathered for the whole step. Elsewhere, where a layer isn't cut along `tensor`, kernels with one
    input are joined, but not in float8 or on GPUs; XLA joins them again for the backward pass where layers are
    unrolled.
    """
    all_kept = run.train.remat == "none"
    if all(run_mesh.sizes[axis] == 1 for axis in GATHERED):
        joined_L = [_joined(one) for one in layer_specs(spec)[: _layers_at_a_time(spec, run_mesh)]]
        kept = (sum if all_kept and run.train.scan_layers else max)(joined_L)
        are_joined = share.tensor == 1 and not run.train.float8 and joins_linears()
        return _FLOAT32 * (kept if are_joined else 0)
    gathered = {**run_mesh.sizes, **dict.fromkeys(GATHERED, 1)}
    specs = specs_of(state.axes, gathered, spec)
    size = {
        part: _FLOAT32 * count_of(leaves, jax.tree.map(run_mesh.sharding, specs[part], is_leaf=_is_spec))
        for part, leaves in state.shapes.params.items()
    }
    stacks = [size.pop(name, 0) for name in STACKS]
    if not all_kept:
        here = spec.layers // run_mesh.sizes["pipeline"] - spec.dense_layers
        return max(stacks[0] // max(spec.dense_layers, 1), stacks[1] // here) + sum(size.values())
    return sum(stacks) // run_mesh.rounds + sum(size.values())


def _is_spec(value: Any) -> bool:
    return isinstance(value, jax.sharding.PartitionSpec)


def _joined(spec: ModelSpec) -> int:
    key_width, value_width = head_widths(spec)
    gate_and_up = 2 * spec.width * spec.ffn_width if spec.gated else 0
    gate_and_up *= spec.shared_experts if spec.experts else 1
    if spec.attention == "heads":
        return gate_and_up + spec.width * key_width * (spec.heads + 2 * spec.kv_heads)
    queries = spec.query_latent or spec.heads * key_width
    inputs = spec.width * (queries + spec.kv_latent + spec.rotary_width)
    return gate_and_up + inputs + spec.kv_latent * spec.heads * (spec.head_width + value_width)
