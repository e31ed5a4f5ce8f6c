"""Libraries that Meshwright runs without."""

import importlib
from typing import Any

from meshwright.errors import UserError


def optional(module: str, what: str) -> Any:
    """Import a library of the extra `datasets`.

    Arguments:
        module: its name.
        what: what needs it, for the message.

    Raises:
        UserError: it isn't installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        library = module.split(".")[0]
        if (error.name or "").split(".")[0] != library:
            raise
        raise UserError(f"{what}: needs {library}; pip install 'meshwright[datasets]'") from None
