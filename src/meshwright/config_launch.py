"""The section `[launch]` of the run file. Imports no framework."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, NonNegativeInt, PositiveFloat, Tag, model_validator

from meshwright.config_base import Section


def _one_or_two(value: Any) -> str:
    return "<range>" if isinstance(value, list) else "<number>"


Workers = Annotated[
    Annotated[NonNegativeInt, Tag("<number>")]
    | Annotated[list[int], Tag("<range>"), Field(min_length=2, max_length=2)],
    Discriminator(_one_or_two),
]


class LaunchSection(Section):
    """Where the run runs."""

    kind: Literal["local", "processes", "ray"] = "local"
    """`local`: in this process. `processes`: in several, as one. `ray`: on a Ray cluster."""
    workers: Workers = 0
    """How many processes; 0: one, or under `ray` as many as fit. Under `ray` also `[fewest, most]`: elastic."""
    devices_per_worker: NonNegativeInt = 0
    """Devices of each process: on a CPU virtual ones, on GPUs its share of the cards. 0: what there is."""
    coordinator: str = ""
    """`host:port` of process 0, where each process is started by hand; empty: this machine's are started here."""
    index: Annotated[int, Field(ge=-1)] = -1
    """Which of the processes this one is, from 0, where each is started by hand."""
    address: str = ""
    """The Ray cluster's; empty: `RAY_ADDRESS`, and without that one of this machine is started and stopped."""
    max_failures: NonNegativeInt = 3
    """How often a run on Ray starts again after a worker or a node is lost."""
    start_timeout: PositiveFloat = 300.0
    """Seconds that a run waits for all its workers: on Ray for places, by hand or under Slurm for them to come."""
    hang_timeout: PositiveFloat = 1800.0
    """Seconds without a finished step after which the workers of a run on Ray are taken to hang, and start again."""
    topology: str = ""
    """Of a TPU slice on Ray, as `4x4`; empty: no TPU, or those of one host."""
    accelerator: str = ""
    """Ray's name of the accelerator to run on, as `TPU-V4` or `H100`; empty: any."""

    @property
    def fewest(self) -> int:
        """The fewest processes that train; 0: not said."""
        return self.workers if isinstance(self.workers, int) else self.workers[0]

    @property
    def most(self) -> int:
        """The most processes that train; 0: not said."""
        return self.workers if isinstance(self.workers, int) else self.workers[1]

    @property
    def processes(self) -> int:
        """How many there are, where it is said; else 1."""
        return self.most or 1

    @property
    def processes_here(self) -> int:
        """How many of them share this machine, as far as the run file says."""
        return self.processes if self.kind == "processes" and not self.coordinator else 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.workers, list) and not 1 <= self.fewest <= self.most:
            raise ValueError(f"workers = {self.workers}: must be [fewest, most], from 1 on")
        if isinstance(self.workers, list) and self.kind != "ray":
            raise ValueError(f'workers = {self.workers}: needs launch.kind = "ray"; set it, or give one number')
        if self.kind == "local" and self.most > 1:
            raise ValueError(
                f'workers = {self.most}: needs launch.kind = "processes" or "ray"; set it, or leave workers out'
            )
        self._check_by_hand()
        self._check_accelerator()
        return self

    def _check_by_hand(self) -> None:
        for key, given in (("coordinator", self.coordinator), ("index", self.index >= 0)):
            if given and self.kind != "processes":
                raise ValueError(
                    f'{key} = {getattr(self, key)!r}: needs launch.kind = "processes"; set it, or leave it out'
                )
        if self.coordinator and not re.fullmatch(r"(\[[^\s\]]+\]|[^\s:]+):\d+", self.coordinator):
            raise ValueError(
                f"coordinator = {self.coordinator!r}: must be host:port, as 10.0.0.1:7777 or [fd00::1]:7777"
            )
        if self.index >= 0 and self.workers and self.index >= self.most:
            raise ValueError(f"index = {self.index}: must be less than launch.workers = {self.most}; count from 0")

    def _check_accelerator(self) -> None:
        for key in ("topology", "accelerator"):
            if getattr(self, key) and self.kind != "ray":
                raise ValueError(f'{key} = {getattr(self, key)!r}: needs launch.kind = "ray"; set it, or leave it out')
        if self.topology and not re.fullmatch(r"\d+x\d+(x\d+)?", self.topology):
            raise ValueError(f"topology = {self.topology!r}: must be the shape of a TPU slice, as 4x4 or 2x2x2")
        if self.topology and not self.accelerator.upper().startswith("TPU-"):
            raise ValueError(
                f"topology = {self.topology!r}: needs launch.accelerator, Ray's name of the TPU; set it, as TPU-V4"
            )
