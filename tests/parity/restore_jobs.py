"""A process that trains, saves on one layout and goes on on another.

    python restore_jobs.py FOLDER DEVICES 'ACTION' ...

An action is `save:LAYOUT` (two steps, then a checkpoint named after the layout) or `LAYOUT>LAYOUT` (takes up the
checkpoint of the first on the second, three steps more). Losses go to `<action>.json`.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from cases import Layout
from helpers import virtual_devices

FAMILY = "mla-moe"
ACCUMULATE = 2
LAYOUTS = {
    layout.name: layout
    for layout in [
        Layout("one", {}),
        Layout("fsdp", {"data": 2, "fsdp": 4}),
        Layout("stages", {"data": 2, "pipeline": 2, "tensor": 2}),
        Layout("circular", {"pipeline": 2, "pipeline_rounds": 2, "fsdp": 4}),
        Layout("context", {"context": 2, "tensor": 4}),
        Layout("expert", {"expert": 4, "data": 2}),
        Layout("two", {"data": 2, "pipeline": 2, "tensor": 2}, 2),
    ]
}


def act(folder: Path, action: str) -> list[float]:
    """Losses of the steps of an action."""
    from jobs import batch, make_engine

    source, _, target = action.removeprefix("save:").partition(">")
    engine = make_engine(FAMILY, LAYOUTS[target or source], ACCUMULATE)
    if target:
        engine.restore(folder / source)
    losses = []
    for step in range(3, 6) if target else range(1, 3):
        whole = batch(step)
        losses.append(float(engine.train_step(type(whole)(*(part[engine.rows] for part in whole[:3])))["loss"]))
    if not target:
        (folder / source).mkdir(exist_ok=True)
        engine.save(folder / source)()
    return losses


def act_as_one_of_several(group, folder: str, actions: list[str]) -> list[list[float]]:
    """The same in one of several processes."""
    found = []
    for action in actions:
        found.append(act(Path(folder), action))
        group.barrier("acted")
    return found


def main() -> None:
    folder, devices, *actions = sys.argv[1:]
    os.environ.update(virtual_devices(int(devices)))
    print(json.dumps([act(Path(folder), action) for action in actions]))


if __name__ == "__main__":
    main()
