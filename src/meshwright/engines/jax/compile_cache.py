"""Compiled programs, kept on disk: the next start of the same run reads them instead of compiling them anew."""

import os
from pathlib import Path

import jax

from meshwright.config import Run


def use_compile_cache(run: Run) -> None:
    """Have JAX keep what it compiles in `train.compile_cache`; call it before anything is compiled.

    A folder that JAX has been given otherwise, by its own `JAX_COMPILATION_CACHE_DIR`, stays. `auto` leaves CPUs out:
    programs for those compile fast, and XLA warns of each that it reads.

    Arguments:
        run: a checked run file.
    """
    wanted = run.train.compile_cache
    given, enabled = (jax.config.values[f"jax_{key}"] for key in ("compilation_cache_dir", "enable_compilation_cache"))
    if wanted == "off" or given or not enabled:
        return
    if wanted == "auto" and jax.default_backend() == "cpu":
        return
    folder = _users_cache() / "meshwright" / "compiled" if wanted == "auto" else Path(wanted).expanduser().absolute()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _users_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
