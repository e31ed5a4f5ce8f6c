"""Stretched rotary positions: what is left alone, what is stretched, and what lies between."""

import math

import numpy as np
import pytest

from meshwright.models import rope
from meshwright.models.attention import wave_frequencies
from meshwright.models.spec import ModelSpec, preset

WIDTH = 64
PLAIN = np.asarray(wave_frequencies(WIDTH, 10_000.0), np.float64)


def stretched(**changes) -> np.ndarray:
    return np.asarray(rope.frequencies(preset("llama-tiny").model_copy(update=changes), WIDTH), np.float64) / PLAIN


def test_all_waves_or_none():
    np.testing.assert_array_equal(stretched(), 1.0)
    np.testing.assert_allclose(stretched(rope_scaling="linear", rope_factor=4.0), 0.25, rtol=1e-6)


def test_llama3_stretches_long_waves_alone():
    ratio = stretched(rope_scaling="llama3", rope_factor=8.0, rope_original_length=1024)
    length = 2 * math.pi / PLAIN
    short, long = length < 1024 / 4, length > 1024
    assert short.sum() > 3 and long.sum() > 3 and (~short & ~long).sum() > 3
    np.testing.assert_allclose(ratio[short], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[long], 1 / 8, rtol=1e-6)
    assert (np.diff(ratio) <= 1e-7).all()


def test_yarn_stretches_by_turns_and_grows():
    spec = preset("llama-tiny").model_copy(
        update={"rope_scaling": "yarn", "rope_factor": 8.0, "rope_original_length": 1024}
    )
    ratio = np.asarray(rope.frequencies(spec, WIDTH), np.float64) / PLAIN
    turns = 1024 * PLAIN / (2 * math.pi)
    np.testing.assert_allclose(ratio[turns > 40], 1.0, rtol=1e-6)
    np.testing.assert_allclose(ratio[turns < 0.7], 1 / 8, rtol=1e-6)
    assert rope.growth(spec) == pytest.approx(0.1 * math.log(8) + 1)
    both = spec.model_copy(update={"rope_mscale": 2.0, "rope_mscale_all": 1.0})
    assert rope.growth(both) == pytest.approx((0.2 * math.log(8) + 1) / (0.1 * math.log(8) + 1))
    assert rope.growth(preset("llama-tiny")) == 1.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": "linear"}, 'rope_scaling = .linear. needs positions = "rotary"'),
        ({"positions": "rotary", "rope_scaling": "yarn"}, "needs rope_original_length > 0"),
        (
            {
                "positions": "rotary",
                "rope_scaling": "llama3",
                "rope_original_length": 8,
                "rope_high_frequency": 1.0,
            },
            "must exceed rope_low_frequency",
        ),
        ({"rope_mscale": 1.0}, "go together"),
        ({"global_every": 2}, "needs window > 0"),
        ({"window": 4, "local_rope_theta": 10.0}, "local_rope_theta = 10.0 needs"),
        ({"experts": 4, "activation": "geglu"}, "geglu"),
        ({"dense_layers": 1}, "dense_layers = 1"),
        ({"experts": 4, "router_groups": 3}, "router_groups = 3"),
        ({"experts": 4, "router_groups": 2, "experts_per_token": 3}, "experts_per_token = 3"),
        (
            {
                **{"attention": "latent", "kv_latent": 8, "rotary_width": 8, "positions": "rotary", "bias": False},
                "qk_norm": "head",
            },
            'qk_norm = .head. needs attention = "heads"',
        ),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        ModelSpec(**changes)


def test_which_layers_have_a_window():
    spec = ModelSpec(layers=7, window=5, global_every=3)
    assert spec.layer_windows == (5, 5, 0, 5, 5, 0, 5)
    assert ModelSpec(layers=2, window=5).layer_windows == (5, 5)
    assert ModelSpec(layers=2).layer_windows == (0, 0)
