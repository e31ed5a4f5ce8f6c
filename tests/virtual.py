"""Eight virtual devices: a test's file that runs itself on them, as they must be there before JAX starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import virtual_devices
from jax.sharding import AxisType

from meshwright.config_train import MESH_AXES


def measured_on_eight_devices(file: str) -> dict[str, Any]:
    """What a file prints as JSON when it runs as a script on eight virtual devices."""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, **virtual_devices(8), "PYTHONPATH": path}
    done = subprocess.run([sys.executable, file], env=env, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mesh(sizes: dict[str, int]) -> jax.sharding.Mesh:
    """A mesh of the first devices, with the axes that a run's has."""
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    first = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES), devices=first)


def random(*shape: int, seed: int) -> jax.Array:
    """Standard normal float32."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)
