"""Layers cut into stages along the pipeline axis, with micro-batches passing through them one behind another.

Shapes: A micro-batches of M examples, T time, D width, L layers.

There are S stages and R rounds; the layers are cut into R S runs of l = L / (R S), and stage s holds the runs s,
S + s, 2 S + s, ... (R = 1: GPipe, Huang et al., 2019; R > 1: circular, after Narayanan et al., 2021). At tick t,
stage s works on item i = t - s: micro-batch i mod A in round i div A. What it makes goes to the stage after it; what
the last stage makes goes back to the first, which keeps it until its next round begins, at tick i + A. All is done
after A R + S - 1 ticks, of which a stage works in A R: the rest, the bubble, is (S - 1) / (A R + S - 1) of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from meshwright.models.decoder import REMAT, Decoder, Start
from meshwright.models.moe import Routing
from meshwright.models.stacks import unstack

AXIS = "pipeline"


def stored_order(layers: int, stages: int, rounds: int) -> tuple[int, ...]:
    """Which layer lies at each place of the stacked blocks, so that each stage's runs lie side by side."""
    run = layers // (stages * rounds)
    firsts = [(turn * stages + stage) * run for stage in range(stages) for turn in range(rounds)]
    return tuple(first + layer for first in firsts for layer in range(run))


def bubble(stages: int, rounds: int, micro_batches: int) -> float:
    """The share of a stage's ticks in which it has nothing to do."""
    return (stages - 1) / (micro_batches * rounds + stages - 1)


def does_keep_all(remat: str, rounds: int, scan_layers: bool) -> bool:
    """Whether nothing of a stage's work is computed again; arguments as in `pipelined`."""
    return remat == "none" and rounds == 1 and not scan_layers


def pipelined(
    model: Decoder, starts_A: Start, *, stages: int, rounds: int, scan_layers: bool, remat: str
) -> tuple[jax.Array, Routing | None]:
    """All layers of the model, over all micro-batches.

    A stage's work is computed again in the backward pass, unless `remat` is `none`, layers are unrolled, and there is
    one round: where a stage holds several runs, what is kept of a tick would be a copy of its run's parameters, too.

    Arguments:
        model: its blocks lie in `stored_order`.
        starts_A: what `Decoder.start` gave for each micro-batch, with a leading axis.
        stages, rounds: S and R; with more than one round, A must be at least S.
        scan_layers: loop over the layers of a run rather than unroll them.
        remat: a key of `meshwright.models.decoder.REMAT`.

    Returns:
        The residual stream after the last layer, `[A, M, T, D]`, and what the routers did, summed over micro-batches.
    """
    apply = model.layer_function(remat)
    stacked = nnx.split(model.blocks)[1]
    run = model.spec.layers // (stages * rounds)
    micro_batches = starts_A.x_BTD.shape[0]
    items = micro_batches * rounds
    keeps_all = does_keep_all(remat, rounds, scan_layers)

    def run_layers(params: Any, turn: jax.Array, start: Start, first_layer: jax.Array) -> tuple[jax.Array, Any]:
        told_L = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, first_layer, run), start.told_L)
        if told_L.dropout_keys_B is not None:
            told_L = told_L._replace(dropout_keys_B=jax.random.wrap_key_data(told_L.dropout_keys_B))

        def one(x_BTD: jax.Array, layer: tuple) -> tuple[jax.Array, Routing | None]:
            return apply(layer[0], x_BTD, start.places, layer[1])

        if not keeps_all:
            layers = _at(params, turn), told_L  # taken in here, so that no tick keeps a copy
            return jax.lax.scan(one, start.x_BTD, layers, unroll=1 if scan_layers else run)
        x_BTD, each = start.x_BTD, []
        for number, of_layer in enumerate(params):
            x_BTD, routing = one(x_BTD, (of_layer, _at(told_L, number)))
            each.append(routing)
        return x_BTD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    if not keeps_all:
        policy = REMAT["products" if remat == "products" else "full"]
        run_layers = jax.checkpoint(run_layers, policy=policy)

    def stage(stage_number: jax.Array, params: Any, starts_A: Start) -> tuple[jax.Array, Routing | None]:
        here = stage_number[0]
        if keeps_all:  # taken apart here: what is the same in all ticks is kept once, and gradients add up by layer
            params = unstack(params)
        else:
            params = jax.tree.map(lambda leaf: leaf.reshape(rounds, run, *leaf.shape[1:]), params)

        def keep(waiting_A: jax.Array, arrived: jax.Array, tick: jax.Array | int) -> jax.Array:
            item = tick - stages  # what the last stage sent in the tick before
            kept = jax.lax.dynamic_update_index_in_dim(waiting_A, arrived, item % micro_batches, 0)
            return jnp.where(item >= 0, kept, waiting_A)

        def work(carry: tuple, tick: jax.Array) -> tuple[tuple, Routing | None]:
            arrived, waiting_A = carry
            waiting_A = keep(waiting_A, arrived, tick)
            item = jnp.clip(tick - here, 0, items - 1)
            turn, micro_batch = item // micro_batches, item % micro_batches
            start = _at(starts_A, micro_batch)
            first_x = jnp.where(turn == 0, start.x_BTD, waiting_A[micro_batch])
            x_BTD = jnp.where(here == 0, first_x, arrived)
            first_layer = (turn * stages + here) * run
            y_BTD, routing = run_layers(params, turn, start._replace(x_BTD=x_BTD), first_layer)
            busy = item == tick - here
            routing_R = jax.tree.map(lambda leaf: _one_hot(turn, rounds, leaf, busy), routing)
            to_next = [(source, (source + 1) % stages) for source in range(stages)]
            return (jax.lax.ppermute(y_BTD, AXIS, to_next), waiting_A), routing_R

        starts_A = starts_A._replace(x_BTD=starts_A.x_BTD.astype(dtype))
        empty = (jnp.zeros_like(starts_A.x_BTD[0]), jnp.zeros_like(starts_A.x_BTD))
        ticks = items + stages - 1
        (arrived, waiting_A), routing = jax.lax.scan(work, empty, jnp.arange(ticks))
        done_A = keep(waiting_A, arrived, ticks)  # the last round's end at the first stage
        done_A = jax.lax.psum(jnp.where(here == 0, done_A.astype(jnp.float32), 0), AXIS)
        routing = jax.tree.map(lambda leaf: leaf.sum(axis=0).reshape(rounds * run, *leaf.shape[3:]), routing)
        return done_A.astype(dtype), routing

    # What goes in whole has its gradient summed over the stages: in float32, since XLA's CPU backend can't in bfloat16.
    dtype, cut, same = starts_A.x_BTD.dtype, PartitionSpec(AXIS), PartitionSpec()
    told_AL = starts_A.told_L
    if told_AL.dropout_keys_B is not None:
        told_AL = told_AL._replace(dropout_keys_B=jax.random.key_data(told_AL.dropout_keys_B))
    starts_A = starts_A._replace(x_BTD=starts_A.x_BTD.astype(jnp.float32), told_L=told_AL)
    run_stages = jax.shard_map(
        stage, in_specs=(cut, cut, same), out_specs=(same, cut), axis_names={AXIS}, check_vma=False
    )
    return run_stages(jnp.arange(stages), stacked, starts_A)


def _at(tree: Any, index: jax.Array | int) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree)


def _one_hot(turn: jax.Array, rounds: int, leaf: jax.Array, busy: jax.Array) -> jax.Array:
    here = (jnp.arange(rounds) == turn) & busy
    return jnp.where(here.reshape(-1, *[1] * leaf.ndim), leaf, 0.0)
