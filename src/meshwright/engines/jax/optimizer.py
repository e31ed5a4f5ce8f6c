"""Update rules and schedules, assembled from Optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from meshwright.config import Run
from meshwright.config_train import OptimizerSection
from meshwright.models.routing import keep_untrained
from meshwright.models.stacks import STACKS

# Parameters of a layer are stacked on a leading axis, so the matrices of the blocks are [L, in, out] arrays, those of
# experts [L, E, in, out].
_STACKED_MATRICES = {ndim: MuonDimensionNumbers(reduction_axis=ndim - 2, output_axis=ndim - 1) for ndim in (3, 4)}


def make_schedule(run: Run, peak: float) -> optax.Schedule:
    """Learning rate by update, counted from 0.

    Warm-up rises linearly and reaches the peak after `warmup_steps` updates; what follows ends at
    `final_share * peak` on the last update of the run.

    Arguments:
        run: `schedule` and `train.steps` are read.
        peak: the highest learning rate.
    """
    s, steps = run.schedule, run.train.steps
    final, after = s.final_share * peak, max(steps - s.warmup_steps - 1, 1)
    if s.kind == "constant":
        main = optax.constant_schedule(peak)
    elif s.kind == "linear":
        main = optax.linear_schedule(peak, final, after)
    elif s.kind == "cosine":
        main = optax.cosine_decay_schedule(peak, after, alpha=s.final_share)
    else:
        decay = min(s.decay_steps or max(steps // 5, 1), after)
        main = optax.linear_schedule(peak, final, decay, transition_begin=after - decay)
    if s.warmup_steps:
        # Update 0 already moves: the first of n warm-up updates has 1/n of the peak.
        warmup = optax.linear_schedule(peak / s.warmup_steps, peak, max(s.warmup_steps - 1, 1))
        main = optax.join_schedules([warmup, main], [s.warmup_steps])
    return lambda count: jnp.maximum(main(count), 0.0)  # rounding may end a decay to 0 just below it


def make_optimizer(run: Run) -> optax.GradientTransformation:
    """The update rule of a run file; gradients come in clipped.

    Weight decay pulls on matrices and embeddings only, not on biases and norms. The four rules: AdamW (Loshchilov
    and Hutter, 2019), Lion (Chen et al., 2023), Muon (Jordan, 2024), schedule-free AdamW (Defazio et al., 2024).
    """
    o = run.optimizer
    rate = make_schedule(run, o.learning_rate)
    if o.kind == "adamw":
        return optax.adamw(rate, o.beta1, o.beta2, weight_decay=o.weight_decay, mask=is_matrix)
    if o.kind == "lion":
        return optax.lion(rate, o.beta1, o.beta2, weight_decay=o.weight_decay, mask=is_matrix)
    if o.kind == "muon":
        return _muon(run, o, rate)
    return optax.contrib.schedule_free(
        optax.chain(
            optax.scale_by_rms(o.beta2, eps_in_sqrt=False, bias_correction=True),
            optax.add_decayed_weights(o.weight_decay, mask=is_matrix),
            optax.scale_by_learning_rate(rate),
        ),
        learning_rate=rate,
        b1=o.beta1,
    )


def _muon(run: Run, o: OptimizerSection, rate: optax.Schedule) -> optax.GradientTransformation:
    def dimensions(matrices: Any) -> Any:
        return jax.tree.map(lambda leaf: _STACKED_MATRICES[leaf.ndim], matrices)

    matrices = optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=dimensions),
        optax.stateless(_scale_by_shape),
        optax.add_decayed_weights(o.weight_decay),
        optax.scale_by_learning_rate(make_schedule(run, o.matrix_learning_rate)),
    )
    rest = optax.adamw(rate, o.beta1, o.beta2, weight_decay=o.weight_decay, mask=is_matrix)
    return optax.partition({"matrix": matrices, "rest": rest}, _muon_labels)


def _scale_by_shape(updates: Any, _params: Any) -> Any:
    # An orthogonal [in, out] matrix moves each output by sqrt(in / out) too much or too little (Bernstein, 2024).
    return jax.tree.map(lambda u: u * max(1.0, u.shape[-1] / u.shape[-2]) ** 0.5, updates)


def is_matrix(params: Any) -> Any:
    """For each parameter, whether it is a matrix (or a table, or a stack of matrices) rather than a vector.

    Arguments:
        params: nested dictionaries as `Decoder` has them, blocks stacked.
    """

    def decide(path: tuple, leaf: jax.Array) -> bool:
        return leaf.ndim - _is_stacked(path) >= 2

    return jax.tree_util.tree_map_with_path(decide, params)


def _muon_labels(params: Any) -> Any:
    def label(path: tuple, leaf: jax.Array) -> str:
        return "matrix" if _is_stacked(path) and leaf.ndim in _STACKED_MATRICES else "rest"

    return jax.tree_util.tree_map_with_path(label, params)


def _is_stacked(path: tuple) -> bool:
    return getattr(path[0], "key", None) in STACKS


def evaluation_params(state: Any, params: Any) -> Any:
    """The parameters to evaluate and to generate with: under schedule-free, the average; otherwise those trained."""
    if isinstance(state, optax.contrib.ScheduleFreeState):
        return keep_untrained(optax.contrib.schedule_free_eval_params(state, params), params)
    return params
