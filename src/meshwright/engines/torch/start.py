"""The parameters that training begins with: `model.init`."""

import json
from pathlib import Path

from meshwright.config import Run
from meshwright.engines.torch.any_start import OwnStart
from meshwright.engines.torch.checkpoint import restore_state
from meshwright.engines.torch.plan import Placed
from meshwright.engines.torch.weights import CheckpointWeights, RandomWeights
from meshwright.errors import UserError
from meshwright.hub.reader import open_checkpoint
from meshwright.models.spec import ANY, ModelSpec


def start(placed: Placed, run: Run, spec: ModelSpec) -> None:
    """Fill the model of a run.

    Arguments:
        placed: the model.
        run: `model.init` is `random`, `hf:...`, or the folder of a checkpoint that another run saved.
        spec: the architecture.

    Raises:
        UserError: the checkpoint isn't there or is broken, or isn't one of this architecture.
    """
    init = run.model.init
    if init == "random":
        own = OwnStart(spec, run.seed) if spec.family == ANY else RandomWeights(placed.names, spec, run.seed)
        placed.fill(own)
    elif init.startswith("hf:"):
        placed.fill(CheckpointWeights(open_checkpoint(init), placed.names, spec))
    else:
        _check(Path(init), init)
        restore_state(Path(init), placed, None, base=True)
    if run.lora.rank:
        placed.fill_adapters(run.seed)


def _check(folder: Path, init: str) -> None:
    if not (folder / "manifest.json").is_file():
        raise UserError(f"model.init = {init!r}: this checkpoint isn't there any more; put it back")
    if json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["identity"].get("lora.rank"):
        raise UserError(
            f"model.init = {init!r}: this checkpoint holds adapters alone; write the whole model with `meshwright "
            "export` and start from that, as hf:<folder>"
        )
