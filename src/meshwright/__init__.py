"""Meshwright: pretrain and fine-tune language models from one run file.

    import meshwright as mw

    run = mw.load_run("examples/stdlib.toml", ["train.steps=100"])
    mw.train(run)
    trained = mw.open_run(run.directory)
    print(trained.generate("def ", temperature=0.7)[0])

Importing the package imports no framework; the first call that needs one does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.api import TrainedRun as TrainedRun
    from meshwright.api import open_run as open_run
    from meshwright.api import plan as plan
    from meshwright.api import prepare as prepare
    from meshwright.api import show_data as show_data
    from meshwright.api import train as train
    from meshwright.config import Run as Run
    from meshwright.config import load_run as load_run
    from meshwright.config import make_run as make_run
    from meshwright.data.sources import Document as Document
    from meshwright.engines.base import Sampling as Sampling
    from meshwright.errors import UserError as UserError
    from meshwright.track.console import make_console as make_console

__version__ = "0.1.0"

_HOMES = {
    "Run": "config",
    "load_run": "config",
    "make_run": "config",
    "UserError": "errors",
    "Document": "data.sources",
    "Sampling": "engines.base",
    "make_console": "track.console",
    "TrainedRun": "api",
    "open_run": "api",
    "plan": "api",
    "prepare": "api",
    "show_data": "api",
    "train": "api",
}

__all__ = [
    "Document",
    "Run",
    "Sampling",
    "TrainedRun",
    "UserError",
    "load_run",
    "make_console",
    "make_run",
    "open_run",
    "plan",
    "prepare",
    "show_data",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"meshwright.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
