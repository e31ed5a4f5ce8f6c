"""The state that training begins with where its parameters come from a checkpoint: `model.init`."""

import json
from pathlib import Path

import optax

from meshwright.engines.jax.checkpoint import restore_state
from meshwright.engines.jax.hf import read_params
from meshwright.engines.jax.optimizer import evaluation_params, make_optimizer
from meshwright.engines.jax.program import Program
from meshwright.engines.jax.state import plan_state
from meshwright.engines.jax.step import Params, TrainState
from meshwright.errors import UserError
from meshwright.hub.reader import open_checkpoint


def start_state(program: Program) -> TrainState:
    """The first state of a run that starts from a checkpoint.

    Arguments:
        program: `model.init` of its run is `hf:...`, or the folder of a checkpoint that another run saved.

    Raises:
        UserError: the checkpoint isn't there or is broken, or isn't one of this architecture.
    """
    init = program.run.model.init
    if init.startswith("hf:"):
        return program.begin(read_params(open_checkpoint(init), program.spec, program.base))
    return program.begin(_saved_params(Path(init), program))


def _saved_params(folder: Path, program: Program) -> Params:
    if not (folder / "manifest.json").is_file():
        raise UserError(f"model.init = {str(folder)!r}: this checkpoint isn't there any more; put it back")
    identity = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["identity"]
    if identity.get("lora.rank"):
        raise UserError(
            f"model.init = {program.run.model.init!r}: this checkpoint holds adapters alone; write the whole model "
            "with `meshwright export` and start from that, as hf:<folder>"
        )
    run, averages = program.run, identity.get("optimizer.kind") == "schedule_free"
    averaging = run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"kind": "schedule_free"})})
    optimizer = make_optimizer(averaging) if averages else optax.identity()  # what it leaves out isn't read
    plan = plan_state(program.model, program.spec, run, program.mesh, optimizer)
    state = restore_state(folder, plan.abstract(), plan)
    if not averages:
        return state.params
    average = program.compiled(evaluation_params, out_shardings=plan.shardings and plan.shardings.params)
    return average(state.optimizer, state.params)
