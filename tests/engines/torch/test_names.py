"""The models of `transformers` hold exactly our parameters, in each family, and start from the same distribution."""

import numpy as np
import pytest

pytest.importorskip("transformers")

import meshwright as mw
from meshwright.engines.torch.build import skeleton, tensor_shapes
from meshwright.engines.torch.names import Names, write_tensor
from meshwright.engines.torch.weights import RandomWeights
from meshwright.models.spec import preset

SMALL = {"layers": 3, "vocab_size": 97}
FAMILIES = {
    "gpt2": "gpt2-tiny",
    "llama": "llama-tiny",
    "qwen2": "qwen2.5-0.5b",
    "mixtral": "moe-tiny",
    "deepseek": "deepseek-tiny",
}


def made(family):
    """The spec, the names, and the parameters that the JAX engine starts from."""
    from flax import nnx

    from meshwright.models.decoder import Decoder

    more = {"dense_layers": 1, "dense_ffn_width": 96} if family == "deepseek" else {}
    small = {"width": 128, "heads": 4, "kv_heads": 2, "head_width": 32, "ffn_width": 64} if family == "qwen2" else {}
    spec = preset(FAMILIES[family]).model_copy(update={**SMALL, **more, **small})
    spec = mw.make_run({"data": {"train": "x"}, "model": spec.model_dump() | {"preset": FAMILIES[family]}}).model.spec
    state = nnx.to_pure_dict(nnx.state(Decoder(spec, rngs=nnx.Rngs(0)), nnx.Param))
    return spec, Names(spec, tensor_shapes(skeleton(spec))), dict(flat(state))


def flat(tree, path=()):
    for name, value in tree.items():
        yield from (
            flat(value, (*path, name)) if isinstance(value, dict) else [(".".join((*path, name)), np.asarray(value))]
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_there_in_the_same_shape(family):
    _, names, params = made(family)
    assert names.ours == {path: value.shape for path, value in params.items()}
    assert names.tensors.keys() == names.theirs.keys()
    for name, tensor in names.tensors.items():
        assert tensor.shape == names.theirs[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_start_has_the_distribution_of_the_jax_engine(family):
    spec, names, params = made(family)
    source = RandomWeights(names, spec, seed=0)
    whole = tuple(slice(None) for _ in range(3))
    tensors = {name: source.tensor(name, whole[: len(shape)]) for name, shape in names.theirs.items()}
    for path, value in params.items():
        ours = names.read(path, (), tensors.__getitem__)
        if np.std(value) == 0:
            np.testing.assert_array_equal(ours, value)
        else:
            assert np.std(ours) == pytest.approx(np.std(value), rel=0.1), path
            assert not np.array_equal(ours, value)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read_again(family):
    _, names, params = made(family)
    tensors = {name: write_tensor(names, name, lambda path, place: params[path][place]) for name in names.theirs}
    for path, value in params.items():
        np.testing.assert_array_equal(names.read(path, (), tensors.__getitem__), value)
        index = (1,) if path.startswith("blocks.") else ()
        np.testing.assert_array_equal(names.read(path, index, tensors.__getitem__), value[index])
