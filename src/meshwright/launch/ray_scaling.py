"""How many workers a run has on a Ray cluster, and what each of them holds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.config import Run
from meshwright.config_launch import LaunchSection
from meshwright.errors import UserError

Resources = dict[str, float]


@dataclass(frozen=True)
class Scale:
    """The workers of a run."""

    platform: str
    """`cpu`, `gpu` or `tpu`."""
    fewest: int
    most: int
    devices: int
    """Of each; 0: what there is."""
    each: Resources = field(default_factory=dict)
    """What Ray sets aside for each."""
    kind: str = ""
    """Of accelerator, with the shape of its slice; empty: any."""

    @property
    def asked_for(self) -> str:
        """In words."""
        many = str(self.most) if self.fewest == self.most else f"{self.fewest} to {self.most}"
        return f"{many} workers of {in_words(self.each)}{f' ({self.kind})' if self.kind else ''} each"


def scale_of(run: Run, nodes: Sequence[Resources]) -> Scale:
    """Fit the workers of a run to a cluster.

    Arguments:
        run: with `launch.kind = "ray"`.
        nodes: the resources of each node that is alive.

    Raises:
        UserError: the workers can't be known, or can't share the cards.
    """
    kind = " ".join(word for word in (run.launch.accelerator, run.launch.topology) if word)
    return replace(_scale_of(run, nodes), kind=kind)


def _scale_of(run: Run, nodes: Sequence[Resources]) -> Scale:
    launch = _with_one_device_each(run.launch) if run.engine == "torch" else run.launch
    nodes = [
        node for node in nodes if not launch.accelerator or f"accelerator_type:{launch.accelerator}" in node
    ] or nodes
    if launch.topology or launch.accelerator.upper().startswith("TPU"):
        return _tpu(launch, nodes)
    if _on_gpus(launch, nodes):
        return _gpu(launch, nodes)
    if any(node.get("TPU") for node in nodes) and os.environ.get("JAX_PLATFORMS") != "cpu":
        raise UserError(
            'launch.kind = "ray": the cluster has TPUs, and launch.accelerator doesn\'t say which; set it, and '
            "launch.topology for a slice of several hosts, or set JAX_PLATFORMS=cpu in the environment to train on CPUs"
        )
    with_cpus = [node for node in nodes if node.get("CPU", 0) >= 1]
    many = launch.most or max(len(with_cpus), 1)
    return Scale("cpu", launch.fewest or many, many, launch.devices_per_worker, {"CPU": 1.0})


def scaling_config(scale: Scale, launch: LaunchSection) -> Any:
    """The same for Ray Train."""
    from ray.train.v2.api.config import ScalingConfig

    options: dict[str, Any] = {"resources_per_worker": dict(scale.each)}
    if scale.platform == "tpu":
        options |= {
            "use_tpu": True,
            "topology": launch.topology or None,
            "accelerator_type": launch.accelerator or None,
        }
    elif scale.platform == "gpu":
        options |= {"use_gpu": True, "accelerator_type": launch.accelerator or None}
    else:
        # On a CPU a worker does best with a machine of its own.
        options["placement_strategy"] = "SPREAD"
    if scale.fewest < scale.most:
        options["elastic_resize_monitor_interval_s"] = 10.0
        return ScalingConfig(num_workers=(scale.fewest, scale.most), **options)
    return ScalingConfig(num_workers=scale.most, **options)


def in_words(resources: Resources) -> str:
    """What is to be set aside, or is there: `1 CPU, 2 GPU (H200)`."""
    named = {key: value for key, value in resources.items() if key in ("CPU", "GPU", "TPU")}
    kinds = ", ".join(sorted(key.partition(":")[2] for key in resources if key.startswith("accelerator_type:")))
    words = ", ".join(f"{value:g} {key}" for key, value in named.items()) or "nothing"
    return f"{words} ({kinds})" if kinds else words


def what_is_there(nodes: Sequence[Resources], free: Resources) -> str:
    """A cluster in words, for a run that finds no place on it."""
    listed = "; ".join(sorted(in_words(node) for node in nodes)[:8]) + ("; …" if len(nodes) > 8 else "")
    return f"{len(nodes)} nodes ({listed}), of which {in_words(free)} are free"


def _on_gpus(launch: LaunchSection, nodes: Sequence[Resources]) -> bool:
    platforms = os.environ.get("JAX_PLATFORMS", "")
    wanted = launch.accelerator or (platforms and "tpu" not in platforms)
    return platforms != "cpu" and (any(node.get("GPU") for node in nodes) or bool(wanted))


def _with_one_device_each(launch: LaunchSection) -> LaunchSection:
    """For the PyTorch engine."""
    if launch.topology or launch.accelerator.upper().startswith("TPU"):
        raise UserError(
            f'launch.accelerator = {launch.accelerator!r}: the PyTorch engine has no TPUs; set engine = "jax", or name '
            "a GPU"
        )
    if launch.devices_per_worker > 1:
        raise UserError(
            f"launch.devices_per_worker = {launch.devices_per_worker}: a process of the PyTorch engine has one device; "
            "leave it out, and set launch.workers to the number of devices"
        )
    return launch.model_copy(update={"devices_per_worker": 1})


def _gpu(launch: LaunchSection, nodes: Sequence[Resources]) -> Scale:
    cards = [int(node["GPU"]) for node in nodes if node.get("GPU", 0) >= 1]
    each, many = launch.devices_per_worker, launch.most
    if not cards and not (each and many):
        raise UserError(
            'launch.kind = "ray": the cluster has no GPUs as yet; set launch.workers and launch.devices_per_worker, or '
            "set JAX_PLATFORMS=cpu in the environment to train on CPUs"
        )
    if not each and not many:  # a process for each host, where they are alike
        each = min(cards) if all(one % min(cards) == 0 for one in cards) else 1
    elif not each:
        # As large as so many still fit, on whatever nodes; an elastic run grows when there are more.
        fewest = launch.fewest
        fitting = [size for size in range(1, max(cards) + 1) if sum(one // size for one in cards) >= fewest]
        if not fitting:
            raise UserError(
                f"launch.workers = {launch.workers}: the cluster has {sum(cards)} GPUs; lower it, or set "
                "launch.devices_per_worker = 1 to wait for more"
            )
        each = max(fitting)
    many = many or sum(one // each for one in cards)
    if not many:
        raise UserError(f"launch.devices_per_worker = {each}: no node has so many GPUs; {max(cards)} are the most")
    return Scale("gpu", launch.fewest or many, many, each, {"CPU": 1.0, "GPU": float(each)})


def _tpu(launch: LaunchSection, nodes: Sequence[Resources]) -> Scale:
    if not launch.topology:
        if launch.most > 1:
            raise UserError(f"launch.workers = {launch.workers}: needs launch.topology, the slice's shape, on TPUs")
        chips = launch.devices_per_worker or int(max((node.get("TPU", 0) for node in nodes), default=0))
        return Scale("tpu", 1, 1, chips, {"TPU": float(chips or 1)})
    from ray.util.tpu import get_tpu_worker_resources

    hosts, each = get_tpu_worker_resources(
        topology=launch.topology,
        accelerator_type=launch.accelerator,
        resources_per_worker={"TPU": launch.devices_per_worker} if launch.devices_per_worker else None,
        num_slices=1,
    )
    if not hosts or launch.most % hosts or launch.fewest % hosts:
        raise UserError(
            f"launch.workers = {launch.workers}: must be a multiple of the {hosts} workers of a slice of "
            f"launch.topology = {launch.topology!r}; leave it out for one slice"
        )
    many = launch.most or hosts
    return Scale(
        "tpu", launch.fewest or many, many, int(each.get("TPU", 0)), {key: float(n) for key, n in each.items()}
    )
