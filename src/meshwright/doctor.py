"""What `meshwright doctor` looks at."""

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers")
_OPTIONAL = ("torch", "transformers", "peft", "bitsandbytes", "ray", "datasets", "s3fs", "gcsfs", "tensorboard")
_NEEDED_BYTES = 2 * 10**9


class Finding(NamedTuple):
    """One thing looked at."""

    name: str
    good: bool
    text: str


def examine() -> list[Finding]:
    """Look at Python, packages, devices, memory and disk; a finding for each, none raised."""
    return [_look(name, look) for name, look in _LOOKS.items()]


def _look(name: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except Exception as error:
        return Finding(name, False, f"{type(error).__name__}: {error}")


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(
        "python", good, f"{platform.python_version()} at {sys.executable}" + ("" if good else "; needs 3.11")
    )


def _packages() -> Finding:
    versions = {name: _version(name) for name in _PACKAGES}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Finding("packages", False, f"missing: {', '.join(missing)}; pip install meshwright")
    return Finding("packages", True, ", ".join(f"{name} {version}" for name, version in versions.items()))


def _optional() -> Finding:
    there = [f"{name} {version}" for name in _OPTIONAL if (version := _version(name))]
    return Finding("optional", True, ", ".join(there) or "none")


def _devices() -> Finding:
    import jax
    import jax.numpy as jnp

    from meshwright.launch.devices import idle_card

    devices, idle = jax.devices(), idle_card()
    good = float(jnp.ones((64, 64)).sum()) == 64 * 64 and not idle
    return Finding("devices", good, idle or f"{len(devices)} x {devices[0].device_kind} ({jax.default_backend()})")


def _memory() -> Finding:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Finding("memory", size >= _NEEDED_BYTES, f"{size / 1e9:.1f} GB, {os.cpu_count()} CPU cores")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free
    with tempfile.NamedTemporaryFile(dir=Path.cwd()):
        pass
    return Finding("disk", free >= _NEEDED_BYTES, f"{free / 1e9:.1f} GB free, writable, at {Path.cwd()}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_LOOKS: dict[str, Callable[[], Finding]] = {
    "python": _python,
    "packages": _packages,
    "optional": _optional,
    "devices": _devices,
    "memory": _memory,
    "disk": _disk,
}
