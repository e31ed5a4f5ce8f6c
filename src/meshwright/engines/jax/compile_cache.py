"""Compiled programs, kept on disk: the next start of the same run reads them instead of compiling them anew."""

import os

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshwright.config import Run
from meshwright.errors import UserError

_ours: set[str] = set()
"""Folders that runs of this process have asked for."""


def use_compile_cache(run: Run) -> None:
    """Have JAX keep what it compiles in `train.compile_cache`; call it before anything is compiled.

    A folder that JAX has been given otherwise, by its own `JAX_COMPILATION_CACHE_DIR`, stays. `auto` leaves CPUs out:
    programs for those compile fast, and XLA warns of each that it reads. It also leaves out runs of several processes:
    just the first of them writes, so that on other machines the others would compile, and wait in vain for it to tune
    kernels with them.

    Arguments:
        run: a checked run file.

    Raises:
        UserError: the folder begins with the name of a user that there isn't.
    """
    given, enabled = (jax.config.values[f"jax_{key}"] for key in ("compilation_cache_dir", "enable_compilation_cache"))
    if not enabled or given not in (None, "", *_ours):
        return
    folder = _folder(run.train.compile_cache)
    if folder != (given or None):
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()  # JAX has opened the one of an earlier run of this process
    if folder:
        _ours.add(folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _folder(wanted: str) -> str | None:
    if wanted == "off":
        return None
    if wanted == "auto":
        if jax.default_backend() == "cpu" or jax.process_count() > 1:
            return None
        users = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        return None if users.startswith("~") else os.path.join(users, "meshwright", "compiled")  # there is no home
    folder = os.path.expanduser(wanted)
    if folder.startswith("~"):
        raise UserError(f"train.compile_cache = {wanted!r}: there is no such user's folder; give another path")
    return os.path.abspath(folder)
