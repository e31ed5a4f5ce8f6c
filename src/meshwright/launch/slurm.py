"""What Slurm tells a task of a job step: which of how many it is, and where the first one runs.

Pure functions of the environment; `scontrol` isn't needed. The variables are those of `man srun`, "OUTPUT ENVIRONMENT
VARIABLES".
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import UserError

_NO_STEP = 0xFFFFFFF0  # from here on Slurm numbers what isn't a step of srun's: the batch script, an interactive shell
_FIRST_PORT, _PORTS = 61000, 4500  # above those that Linux gives to outgoing connections
_CARDS_ARE_BOUND = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_BIND")


@dataclass(frozen=True)
class Step:
    """A task of a job step."""

    rank: int
    """Which task this is, from 0."""
    size: int
    """How many there are."""
    coordinator: str
    """`host:port` of the first one."""
    rank_here: int
    """Which of this machine's tasks it is, from 0."""
    size_here: int
    """How many tasks this machine has."""
    cards_are_bound: bool
    """Whether Slurm itself gives each task cards of its own."""


def step_of(environment: Mapping[str, str]) -> Step | None:
    """The task that this process is.

    Arguments:
        environment: as `os.environ`.

    Returns:
        None: this isn't one of several tasks that `srun` started; a batch script or an interactive shell isn't.

    Raises:
        UserError: a variable of Slurm's isn't as Slurm writes it.
    """
    needed = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if not nodes or any(name not in environment for name in needed):
        return None
    job, step, rank, rank_here = (_number(environment, name) for name in needed)
    size = _number(environment, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS")
    if size < 2 or step >= _NO_STEP:
        return None
    port = _FIRST_PORT + (job + 97 * step) % _PORTS  # steps of a job may run side by side
    tasks = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environment, "SLURM_NODEID")
    size_here = tasks[node] if node < len(tasks) else rank_here + 1
    bound = any(environment.get(name, "").rpartition(":")[2] not in ("", "none") for name in _CARDS_ARE_BOUND)
    return Step(rank, size, f"{expand(nodes)[0]}:{port}", rank_here, size_here, bound)


def expand(nodes: str) -> list[str]:
    """The names in a list of nodes as Slurm writes it: `node[01-03,7],gpu2` is node01, node02, node03, node7, gpu2.

    Raises:
        UserError: it isn't such a list.
    """
    if not re.fullmatch(r"[\w.-]+(,[\w.-]+)*", re.sub(r"\[\d+(-\d+)?(,\d+(-\d+)?)*\]", "0", nodes)):
        raise UserError(f"SLURM_JOB_NODELIST = {nodes!r}: isn't a list of nodes as Slurm writes it")
    return [name for part in re.findall(r"(?:[^\[,]|\[[^\]]*\])+", nodes) for name in _names(part)]


def tasks_per_node(text: str) -> list[int]:
    """How many tasks each node has, from `SLURM_STEP_TASKS_PER_NODE`: `2(x3),1` is 2, 2, 2, 1."""
    counts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in counts for _ in range(int(times or 1))]


def _names(part: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    numbers, _, after = rest.partition("]")
    tails = _names(after)
    names = []
    for span in numbers.split(","):
        first, _, last = span.partition("-")
        for number in range(int(first), int(last or first) + 1):
            names += [f"{before}{number:0{len(first)}}{tail}" for tail in tails]
    return names


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "0")
    if not text.isdecimal():
        raise UserError(f"{name} = {text!r} in the environment: must be a number, as Slurm sets it; unset or mend it")
    return int(text)
