"""Parameters straight from a checkpoint onto every mesh: the right ones, all of them, and never twice."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from virtual import measured_on_eight_devices

BASE = {
    "llama": {
        "preset": "llama-tiny",
        **{"layers": 4, "width": 32, "heads": 4, "kv_heads": 2, "ffn_width": 48, "context_length": 32},
        **{"vocab_size": 61, "tied_embeddings": False},
    },
    "gpt2": {
        "preset": "gpt2-tiny",
        **{"layers": 4, "width": 32, "heads": 4, "ffn_width": 64, "context_length": 32, "vocab_size": 61},
    },
    "deepseek": {
        "preset": "deepseek-tiny",
        **{"layers": 4, "width": 32, "heads": 4, "head_width": 8, "ffn_width": 16, "context_length": 32},
        **{"kv_latent": 16, "query_latent": 24, "rotary_width": 4, "value_width": 10, "vocab_size": 61},
        **{"experts": 4, "dense_layers": 1, "dense_ffn_width": 24},
    },
}
MESHES = {
    "fsdp": {"data": 1, "fsdp": 8},
    "tensor, vocabulary padded": {"data": 2, "fsdp": 2, "tensor": 2},
    "circular pipeline": {"data": 1, "fsdp": 2, "tensor": 2, "pipeline": 2, "pipeline_rounds": 2},
    "replicas": {"data": 8},
}
BOTH = [(family, mesh) for family in BASE for mesh in MESHES if family != "deepseek" or mesh != "circular pipeline"]


def make_run(model, mesh):
    import meshwright as mw

    train = {"batch_size": 16, "micro_batch_size": 8, "sequence_length": 16}
    return mw.make_run({"data": {"train": "x"}, "model": model, "mesh": mesh, "train": train})


def write_random(folder, run, dtype):
    """A checkpoint of random numbers, and the parameters that it holds, whole and in order."""
    import optax

    from meshwright.config_train import MESH_AXES
    from meshwright.engines.jax.hf import real_shapes
    from meshwright.engines.jax.mesh import RunMesh
    from meshwright.engines.jax.state import plan_state
    from meshwright.hub.export import write_model
    from meshwright.models.decoder import Decoder

    spec = run.model.spec
    plan = plan_state(Decoder, spec, run, RunMesh(dict.fromkeys(MESH_AXES, 1), None, 1), optax.identity())
    shapes, seeds = real_shapes(plan, spec), {}

    class Random:
        def __init__(self):
            self.shapes = shapes

        def read(self, path, index):
            seeds.setdefault(path, len(seeds))
            generator = np.random.default_rng([seeds[path], *index])
            return generator.standard_normal(shapes[path][len(index) :], np.float32)

    folder.mkdir(parents=True)
    parameters = Random()
    write_model(folder, spec, parameters, dtype=dtype, shard_bytes=10**7, tokens={})
    return parameters


def differing(folder, family, mesh):
    """Names of parameters that aren't what the checkpoint holds; the vocabulary's padding must be zeros."""
    import jax

    from meshwright.engines.jax.hf import HostParameters, name_of, read_params
    from meshwright.engines.jax.program import Program
    from meshwright.hub.reader import open_checkpoint
    from meshwright.models.decoder import Decoder
    from meshwright.models.hf import weights

    run = make_run(BASE[family], {})
    parameters = write_random(folder, run, "float32")
    program = Program(make_run(BASE[family], mesh), run.model.spec, model=Decoder)
    params = read_params(open_checkpoint(f"hf:{folder}"), run.model.spec, program.state)
    on_host, wrong = HostParameters(params, run.model.spec, program), []
    in_order = jax.tree.leaves(program.state.in_order(params))  # as the model takes them
    rules = {rule.ours: rule for rule in weights(run.model.spec)}
    shapes = jax.tree_util.tree_flatten_with_path(program.state.shapes.params)[0]
    for (path, like), leaf in zip(shapes, in_order, strict=True):
        name = name_of(path)
        stacked = rules[name].stacked
        slices = list(np.ndindex(*parameters.shapes[name][:stacked]))
        real = np.stack([parameters.read(name, index) for index in slices])
        ours = np.stack([on_host.read(name, index) for index in slices])
        whole = np.asarray(leaf).reshape(len(slices), *like.shape[stacked:])
        padding = [(0, there - here) for there, here in zip(whole.shape, real.shape, strict=True)]
        if not (np.array_equal(real, ours) and np.array_equal(whole, np.pad(real, padding))):
            wrong.append(name)
    orders = program.state.order_L is not None
    return {"wrong": wrong, "padded": int(params["embedding"].shape[0]) - 61, "reordered": orders}


def peak(folder):
    """Megabytes of a checkpoint as float32, and by how much the memory of this process grows while it is read."""
    import jax
    import jax.numpy as jnp

    from meshwright.engines.jax.hf import read_params
    from meshwright.engines.jax.program import Program
    from meshwright.hub.reader import open_checkpoint
    from meshwright.models.decoder import Decoder

    big = {"width": 768, "heads": 12, "kv_heads": 4, "ffn_width": 2048, "layers": 8, "vocab_size": 8000}
    run = make_run({"preset": "llama-tiny", **big}, {"data": 1, "fsdp": 8})
    parameters = write_random(folder, run, "bfloat16")
    program = Program(run, run.model.spec, model=Decoder)
    whole = sum(int(np.prod(shape)) for shape in parameters.shapes.values()) * 4 / 2**20
    jax.block_until_ready(jnp.ones(8))
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    params = read_params(open_checkpoint(f"hf:{folder}"), run.model.spec, program.state)
    jax.block_until_ready(params)
    return {"whole": whole, "grown": status("VmHWM") - before}


def status(key):
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith(key)).split()[1]) / 2**10


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    os.environ["MESHWRIGHT_TEST_FOLDER"] = str(tmp_path_factory.mktemp("checkpoints"))
    try:
        return measured_on_eight_devices(__file__)
    finally:
        del os.environ["MESHWRIGHT_TEST_FOLDER"]


@pytest.mark.parametrize(("family", "mesh"), BOTH)
def test_every_mesh_gets_the_checkpoints_parameters(measured, family, mesh):
    found = measured[f"{family}, {mesh}"]
    assert found["wrong"] == []
    assert found["padded"] == (1 if "tensor" in MESHES[mesh] else 0)
    assert found["reordered"] == ("pipeline" in MESHES[mesh])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_host_holds_the_model_twice(measured):
    """On virtual devices, what they hold is the host's memory too: so it grows by the model, and by little more."""
    assert measured["peak"]["whole"] > 200
    assert 0.9 < measured["peak"]["grown"] / measured["peak"]["whole"] < 1.3


if __name__ == "__main__":
    there = Path(os.environ["MESHWRIGHT_TEST_FOLDER"])
    results = {f"{family}, {mesh}": differing(there / family / mesh, family, MESHES[mesh]) for family, mesh in BOTH}
    print(json.dumps({**results, "peak": peak(there / "big")}))
