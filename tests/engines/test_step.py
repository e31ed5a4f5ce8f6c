import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import run_values

from meshwright.config import make_run
from meshwright.data.examples import Batch
from meshwright.engines.jax.engine import JaxEngine
from meshwright.engines.jax.optimizer import is_matrix, make_schedule
from meshwright.engines.jax.program import Program, compute_dtype
from meshwright.engines.jax.step import make_loss
from meshwright.models.decoder import Decoder

VOCAB = 61
PRESETS = ["gpt2-tiny", "minigpt-tiny", "llama-tiny"]


def make(preset: str = "gpt2-tiny", **sections):
    model = {"preset": preset, "kv_heads": 2, "vocab_size": VOCAB, **sections.pop("model", {})}
    return make_run(run_values("x", model=model, **sections))


def batch(seed: int = 0, ragged: bool = True, size: int = 4) -> Batch:
    random = np.random.default_rng(seed)
    inputs, targets = random.integers(0, VOCAB, (2, size, 32), dtype=np.int32)
    lengths = random.integers(3, 33, (size, 1)) if ragged else np.full((size, 1), 32)
    return Batch(inputs, targets, (np.arange(32) < lengths).astype(np.float32))


def program_of(run) -> Program:
    return Program(run, run.model.spec, model=Decoder)


def initial_params(run) -> dict:
    return program_of(run).make_state().params


def loss_of(run, params, batch: Batch):
    """Sum of the losses of a batch, and of the tokens."""
    program = program_of(run)
    loss = make_loss(program.state.graph, run, run.model.spec, program.mesh, jnp.float32)(
        params, program.mesh.place(batch)
    )
    return loss.total, loss.tokens


def params_of(engine: JaxEngine) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(engine._state.params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("preset", PRESETS)
def test_micro_batches_change_nothing(preset):
    """Ragged masks, clipping and dropout on: a mean of means, or a key by micro-batch, would differ."""
    engines = {
        size: JaxEngine(run, run.model.spec)
        for size in (4, 2)
        for run in [
            make(preset, model={"dropout": 0.2}, train={"micro_batch_size": size}, optimizer={"clip_norm": 0.5})
        ]
    }
    values = {size: [] for size in engines}
    for size, engine in engines.items():
        for step in range(3):
            values[size].append({k: float(v) for k, v in engine.train_step(batch(step)).items()})
    for whole, parts in zip(values[4], values[2], strict=True):
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
        assert parts["tokens"] == whole["tokens"] < 4 * 32
    for name, value in params_of(engines[4]).items():
        np.testing.assert_allclose(params_of(engines[2])[name], value, rtol=1e-4, atol=2e-5, err_msg=name)
    rows = [Batch(*(np.repeat(part[row : row + 1], 4, axis=0) for part in batch(0)[:3])) for row in range(4)]
    totals = [engines[4].eval_step(row) for row in rows]  # rows do differ, in length and in loss
    assert np.std([float(total / tokens) for total, tokens in totals]) > 1e-3
    assert len({float(tokens) for _, tokens in totals}) > 1


def test_accumulation_is_really_compiled():
    def program(size):
        program = program_of(make(train={"micro_batch_size": size}))
        step = program.train_step
        return str(jax.make_jaxpr(step)(program.state.shapes, program.mesh.abstract_batch(program.run)))

    assert "length=4" in program(1)
    assert "length=4" not in program(4)


def test_adamw_by_hand():
    run = make(optimizer={"kind": "adamw", "weight_decay": 0.5, "clip_norm": 0.0}, schedule={"kind": "constant"})
    engine = JaxEngine(run, run.model.spec)
    params, b = initial_params(run), batch()

    def loss(params):
        total, tokens = loss_of(run, params, b)
        return total / tokens

    gradients = jax.jit(jax.grad(loss))(params)
    o = run.optimizer
    engine.train_step(b)
    after = params_of(engine)
    for path, before in jax.tree_util.tree_flatten_with_path(params)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        gradient = np.asarray(_leaf(gradients, path), np.float64)
        step = gradient / (np.sqrt(gradient**2) + 1e-8)  # bias-corrected moments of a first step
        decays = name.endswith("kernel") or name.endswith("embedding")
        expected = np.asarray(before) - o.learning_rate * (step + decays * o.weight_decay * np.asarray(before))
        sure = np.abs(gradient) > 1e-6  # below, rounding decides the sign of a first step
        np.testing.assert_allclose(after[name][sure], expected[sure], rtol=1e-4, atol=1e-6, err_msg=name)


def _leaf(tree, path):
    for part in path:
        tree = tree[part.key]
    return tree


def test_decay_reaches_matrices_only():
    params = initial_params(make())
    chosen = jax.tree_util.tree_flatten_with_path(is_matrix(params))[0]
    names = {jax.tree_util.keystr(path, simple=True, separator="."): decays for path, decays in chosen}
    assert {name.split(".")[-1] for name, decays in names.items() if decays} == {
        "kernel",
        "embedding",
        "position_embedding",
    }
    assert {name.split(".")[-1] for name, decays in names.items() if not decays} == {"bias", "scale"}


@pytest.mark.parametrize("kind", ["adamw", "lion", "muon", "schedule_free"])
def test_each_optimizer_learns(kind):
    run = make(optimizer={"kind": kind, "learning_rate": 1e-3}, train={"steps": 30})
    engine = JaxEngine(run, run.model.spec)
    before = float(engine.eval_step(batch())[0])
    for _ in range(30):
        engine.train_step(batch())
    after = float(engine.eval_step(batch())[0])
    assert after < 0.9 * before


def test_optimizers_differ():
    losses = set()
    for kind in ["adamw", "lion", "muon", "schedule_free"]:
        run = make(optimizer={"kind": kind})
        engine = JaxEngine(run, run.model.spec)
        losses.add(tuple(round(float(engine.train_step(batch(step))["loss"]), 5) for step in range(4)))
    assert len(losses) == 4


def test_muon_moves_matrices_orthogonally_and_at_their_own_rate():
    def moved(**rates):
        run = make(optimizer={"kind": "muon", "weight_decay": 0.0, **rates}, schedule={"kind": "constant"})
        engine = JaxEngine(run, run.model.spec)
        before = params_of(engine)
        engine.train_step(batch())
        return {name: before[name] - value for name, value in params_of(engine).items()}

    slow, fast = moved(matrix_learning_rate=0.01), moved(matrix_learning_rate=0.03)
    for name in ("blocks.attention.query.kernel", "blocks.mlp.up.kernel", "blocks.mlp.down.kernel"):
        np.testing.assert_allclose(fast[name], 3 * slow[name], rtol=1e-3, atol=1e-6)
        for layer in slow[name]:
            scale = 0.01 * max(1.0, layer.shape[1] / layer.shape[0]) ** 0.5
            singular = np.linalg.svd(layer / scale, compute_uv=False)
            assert 0.5 < np.median(singular) < 1.3
    for name in ("embedding", "final_norm.scale", "blocks.mlp.up.bias"):
        np.testing.assert_array_equal(fast[name], slow[name])
        assert np.abs(slow[name]).max() > 0


def test_muon_trains_the_matrices_of_experts():
    model = {"preset": "moe-tiny", "layers": 2, "experts": 2, "experts_per_token": 2, "vocab_size": VOCAB}
    values = run_values("x", model=model, optimizer={"kind": "muon", "weight_decay": 0.0, "matrix_learning_rate": 0.01})
    engine = JaxEngine(make_run(values | {"schedule": {"kind": "constant"}}), make_run(values).model.spec)
    before = params_of(engine)
    engine.train_step(batch())
    moved = {name: before[name] - value for name, value in params_of(engine).items()}
    for name in ("blocks.mlp.up", "blocks.mlp.down"):
        assert moved[name].ndim == 4
        for matrix in moved[name].reshape(-1, *moved[name].shape[-2:]):
            scale = 0.01 * max(1.0, matrix.shape[1] / matrix.shape[0]) ** 0.5
            assert 0.5 < np.median(np.linalg.svd(matrix / scale, compute_uv=False)) < 1.3


def test_schedule_free_evaluates_the_average():
    run = make(optimizer={"kind": "schedule_free", "learning_rate": 0.1})
    engine = JaxEngine(run, run.model.spec)
    for step in range(5):
        engine.train_step(batch(step, ragged=False))
    averaged = float(engine.eval_step(batch(9))[0])
    trained = float(loss_of(run, engine._state.params, batch(9))[0])
    state = engine._state.optimizer
    average = optax.contrib.schedule_free_eval_params(state, engine._state.params)
    assert averaged == pytest.approx(float(loss_of(run, average, batch(9))[0]), rel=1e-5)
    assert averaged != pytest.approx(trained, rel=1e-4)


def test_the_average_is_made_once_for_all_batches_of_an_evaluation(tmp_path, monkeypatch):
    run = make(optimizer={"kind": "schedule_free", "learning_rate": 0.1})
    engine, made = JaxEngine(run, run.model.spec), []
    average = engine._program.average
    monkeypatch.setattr(engine._program, "average", lambda *state: made.append(1) or average(*state))

    def losses() -> list[float]:
        return [float(engine.eval_step(batch(step))[0]) for step in (8, 9)]

    engine.train_step(batch(0, ragged=False))
    first = losses()
    engine.save(tmp_path)()
    assert len(made) == 1
    engine.train_step(batch(1, ragged=False))
    assert losses() != first  # that of another step
    assert len(made) == 2
    engine.restore(tmp_path)
    assert losses() == first


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"kind": "constant"}, {0: 1.0, 99: 1.0}),
        ({"kind": "constant", "warmup_steps": 10}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 99: 1.0}),
        ({"kind": "constant", "warmup_steps": 1}, {0: 1.0, 1: 1.0}),
        ({"kind": "linear", "warmup_steps": 0, "final_share": 0.0}, {0: 1.0, 33: 2 / 3, 99: 0.0}),
        ({"kind": "linear", "warmup_steps": 10, "final_share": 0.5}, {9: 1.0, 10: 1.0, 99: 0.5}),
        ({"kind": "cosine", "warmup_steps": 10, "final_share": 0.1}, {10: 1.0, 99: 0.1}),
        ({"kind": "cosine", "final_share": 0.0}, {0: 1.0, 33: 0.75, 99: 0.0}),
        ({"kind": "wsd", "warmup_steps": 10, "final_share": 0.0}, {9: 1.0, 79: 1.0, 89: 0.5, 99: 0.0}),
        ({"kind": "wsd", "warmup_steps": 90, "final_share": 0.1}, {89: 1.0, 90: 1.0, 99: 0.1}),
        ({"kind": "wsd", "decay_steps": 100, "final_share": 0.2}, {0: 1.0, 99: 0.2}),
        ({"kind": "wsd", "decay_steps": 50, "final_share": 0.2}, {49: 1.0, 74: 0.6, 99: 0.2}),
    ],
)
def test_schedules(schedule, expected):
    run = make(schedule=schedule, train={"steps": 100})
    rate = make_schedule(run, 1.0)
    assert {step: float(rate(step)) for step in expected} == pytest.approx(expected, abs=1e-6)


def test_clipping_is_by_the_norm_of_the_whole_model():
    def updates(clip_norm):
        run = make(optimizer={"clip_norm": clip_norm})
        seen = {}
        optimizer = optax.stateless(lambda gradients, _: jax.tree.map(lambda g: -g, gradients))
        engine = JaxEngine(run, run.model.spec, optimizer=optimizer)
        before = params_of(engine)
        seen["norm"] = float(engine.train_step(batch())["grad_norm"])
        moved = {name: before[name] - value for name, value in params_of(engine).items()}
        seen["moved"] = np.sqrt(sum((np.float64(value) ** 2).sum() for value in moved.values()))
        return seen

    free, clipped = updates(0.0), updates(0.1)
    assert free["norm"] == pytest.approx(clipped["norm"], rel=1e-6)  # what is logged is the norm before clipping
    assert free["moved"] == pytest.approx(free["norm"], rel=1e-4)
    assert clipped["moved"] == pytest.approx(0.1, rel=1e-4)


def test_skip_leaves_everything_but_the_count():
    run = make(train={"on_nonfinite": "skip"})
    engine = JaxEngine(run, run.model.spec)
    engine.train_step(batch())
    before, steps = params_of(engine), int(engine._state.step)
    bad = batch()._replace(weights_BT=np.full((4, 32), np.nan, np.float32))
    assert np.isnan(float(engine.train_step(bad)["loss"]))
    for name, value in params_of(engine).items():
        np.testing.assert_array_equal(value, before[name])
    assert int(engine._state.step) == steps + 1
    assert np.isfinite(float(engine.train_step(batch())["loss"]))
    assert any((value != before[name]).any() for name, value in params_of(engine).items())


def test_own_metrics_see_the_update():
    run = make()
    metrics = {"largest": lambda update: jnp.abs(update.updates["embedding"]).max()}
    engine = JaxEngine(run, run.model.spec, metrics=metrics)
    before = params_of(engine)["embedding"]
    largest = float(engine.train_step(batch())["largest"])
    assert largest == pytest.approx(np.abs(params_of(engine)["embedding"] - before).max(), rel=1e-3)


def test_dropout_is_on_in_training_and_off_in_evaluation():
    def engine(rate):
        run = make(model={"dropout": rate})
        return JaxEngine(run, run.model.spec)

    off, on = engine(0.0), engine(0.3)
    assert float(off.eval_step(batch())[0]) == float(on.eval_step(batch())[0])
    assert float(off.train_step(batch())["loss"]) != float(on.train_step(batch())["loss"])


def test_compute_dtype():
    assert compute_dtype(make()) == jnp.float32  # on a CPU
    assert compute_dtype(make(train={"compute_dtype": "bfloat16"})) == jnp.bfloat16
    run = make(train={"compute_dtype": "bfloat16"})
    engine = JaxEngine(run, run.model.spec)
    exact = JaxEngine(make(), run.model.spec)
    rough, fine = float(engine.train_step(batch())["loss"]), float(exact.train_step(batch())["loss"])
    assert rough == pytest.approx(fine, rel=2e-3)
    assert rough != fine
    assert all(value.dtype == np.float32 for value in params_of(engine).values())


def test_initial_parameters_by_seed():
    spec = make().model.spec
    one, same, other = (initial_params(make(seed=seed))["embedding"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert (np.asarray(one) != np.asarray(other)).any()
    eager = nnx.to_pure_dict(nnx.state(Decoder(spec, rngs=nnx.Rngs(params=0)), nnx.Param))["embedding"]
    np.testing.assert_allclose(one, eager, rtol=1e-5, atol=1e-7)
