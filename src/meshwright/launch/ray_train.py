"""The driver of a run on Ray: starts the workers through Ray Train, shows what they say, and sees that they end.

The workers (`ray_worker`) are in touch with it through an actor (`ray_desk`). Ray Train starts them again when one is
lost; where they go on is told by the run directory alone.
"""

import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from meshwright.checkpoints import Checkpoints
from meshwright.config import Run
from meshwright.errors import UserError
from meshwright.launch.joining import not_installed
from meshwright.launch.ray_cluster import is_own_cluster, package_path, set_unless_given
from meshwright.launch.ray_desk import Desk, News
from meshwright.launch.ray_scaling import Scale, scale_of, scaling_config, what_is_there
from meshwright.launch.ray_worker import MOVE, Task, train_worker
from meshwright.signals import Stop, stop_signals
from meshwright.storage.lease import JOB
from meshwright.storage.store import is_remote
from meshwright.track.console import Console
from meshwright.trainer import Outcome

_POLL_SECONDS = 0.25
_GONE_SECONDS = 5.0
_NOTED_SECONDS = 20.0  # for Ray Train to note that the run failed, and not that it was broken off
_ELASTIC_START_SECONDS = 10.0
# What `engines.jax.memory` asks of glibc comes too late for the threads that a worker of Ray has from its start.
_KEEP_FREED_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
_PASSED = {
    "jax": ("JAX_", "PJRT_", "XLA_", "NCCL_", "MESHWRIGHT_"),
    "torch": ("MESHWRIGHT_", "GLOO_", "NCCL_", "TORCH_"),
}
_SNAPSHOTS = ("checkpoint_manager_snapshot.json", ".validate_storage_marker")


def train_on_ray(ray: Any, run: Run, console: Console, parts: dict[str, Any] | None = None) -> Outcome:
    """Train a run, whose data is prepared, on a Ray cluster, and wait for the end.

    The first SIGINT or SIGTERM has the workers stop together and save; another, a second or more later, ends them at
    once. When this process ends, however it does, so do they.

    Arguments:
        ray: the module, connected.
        run: a checked run file with `launch.kind = "ray"`.
        console: where progress is shown.
        parts: a researcher's own `model`, `optimizer` and `metrics`.

    Raises:
        UserError: the workers find no place, failed too often, or met what starting again doesn't mend; it says what.
        KeyboardInterrupt, SystemExit: a second signal came.
    """
    _check_folder(run)
    scale = scale_of(run, _nodes(ray))
    with ExitStack() as closing:
        closing.enter_context(set_unless_given(_settings(run, scale)))
        stop = closing.enter_context(stop_signals())
        desk = _make_desk(ray)
        closing.callback(desk.close.remote)
        directory = closing.enter_context(_folder_for_ray(run))
        job = uuid.uuid4().hex
        mark = directory / f".driver-{job}"  # by which the workers see whether they have the same folder
        mark.touch()
        closing.callback(mark.unlink, missing_ok=True)
        closing.callback(_remove_snapshots, directory)
        while True:
            _remove_snapshots(directory)
            fit = _Fit(_make_trainer(run, mark, scale, desk, job, parts or {}))
            fit.start()
            if not _attend(ray, run, scale, desk, fit, console, stop):
                committed = Checkpoints(run.directory / "checkpoints", 1).committed()
                return Outcome(run.place, committed[-1].step if committed else 0, stopped_by=stop.signal)
            outcome = _outcome(run, fit)
            if outcome.stopped_by != MOVE:
                return outcome


def worker_environment(run: Run, platform: str, directory: Path) -> dict[str, str]:
    """What a worker's environment must say.

    Arguments:
        run: whose worker it is.
        platform: `cpu`, `gpu` or `tpu`.
        directory: of the run.
    """
    memory = {} if os.environ.get("MESHWRIGHT_MALLOC") == "default" else _KEEP_FREED_MEMORY
    passed = {key: value for key, value in os.environ.items() if key.startswith(_PASSED[run.engine])}
    own = {"PYTHONUNBUFFERED": "1", **package_path()}
    if run.engine == "torch":
        # Without a card of its own a worker may see those of its node.
        return {**passed, **own, **({"CUDA_VISIBLE_DEVICES": "", **memory} if platform == "cpu" else {})}
    # Workers that start again needn't compile again. What is compiled for one CPU may not run on another.
    # Each of them must find what the others find, so it isn't for folders that they don't share.
    compiled = {}
    if platform != "cpu" and not is_remote(run.run_dir) and run.train.compile_cache == "auto":
        compiled = {"JAX_COMPILATION_CACHE_DIR": str(directory / "workers" / "compiled")}
    if platform == "cpu":
        own |= {"JAX_PLATFORMS": "cpu", **memory}
    if platform == "gpu":
        own["LD_LIBRARY_PATH"] = ""  # a system's CUDA would be taken in place of the one that JAX came with
    return {**compiled, **passed, **own}


def _make_trainer(run: Run, mark: Path, scale: Scale, desk: Any, job: str, parts: dict[str, Any]) -> Any:
    from ray.train.v2.api.config import FailureConfig, RunConfig

    directory, name = mark.parent, "" if is_remote(run.run_dir) else mark.name
    environment = worker_environment(run, scale.platform, directory)
    task = Task(run.to_toml(), os.getcwd(), desk, scale.platform, scale.devices, scale.most, name, parts)
    return _trainer_of(run, scale, desk)(
        _Call(train_worker, task),
        scaling_config=scaling_config(scale, run.launch),
        run_config=RunConfig(
            name=directory.name,
            storage_path=str(directory.parent),
            failure_config=FailureConfig(max_failures=run.launch.max_failures),
            callbacks=[_tell_of_failures(desk, run)],
            worker_runtime_env={"env_vars": {JOB: job, **environment}},
        ),
    )


def _trainer_of(run: Run, scale: Scale, desk: Any) -> Any:
    """Ray Train's class for the engine, with our own way to start its processes."""
    if run.engine == "jax":
        from ray.train.v2.jax import JaxTrainer

        from meshwright.launch.ray_backend import JaxProcesses

        ours = JaxProcesses(use_tpu=scale.platform == "tpu", use_gpu=scale.platform == "gpu", desk=desk)
        return partial(_with_fewer_actors(JaxTrainer), jax_config=ours)
    try:
        from ray.train.v2.torch.torch_trainer import TorchTrainer

        from meshwright.launch.ray_torch import TorchProcesses
    except ModuleNotFoundError as error:
        raise not_installed(error) from None
    return partial(_with_fewer_actors(TorchTrainer), torch_config=TorchProcesses(desk=desk))


def _with_fewer_actors(trainer: Any) -> Any:
    """A class of Ray Train's that leaves out actors without work: each takes a processor seconds to start.

    No datasets are given to Ray Train. What gives back the places of workers whose controller is gone has nothing to do
    on a cluster that ends with the run.
    """
    idle = {"DatasetsCallback"} | ({"PlacementGroupCleanerCallback"} if is_own_cluster() else set())

    class Trainer(trainer):
        def _create_default_callbacks(self) -> list[Any]:
            return [one for one in super()._create_default_callbacks() if type(one).__name__ not in idle]

    return Trainer


class _Call:
    """A function with its argument, which Ray names by the function."""

    def __init__(self, function: Any, argument: Any) -> None:
        self._function, self._argument = function, argument
        self.__name__ = self.__qualname__ = function.__name__

    def __call__(self) -> Any:
        return self._function(self._argument)


class _Fit(threading.Thread):
    """Ray Train at work, in a thread: the main one hears signals."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(name="fit", daemon=True)
        self._trainer = trainer
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._trainer.fit()
        except BaseException as error:
            self.error = error


def _attend(ray: Any, run: Run, scale: Scale, desk: Any, fit: _Fit, console: Console, stop: Stop) -> bool:
    """Until the workers have ended; false: they are to stop, and none is there."""
    asked = False
    while True:
        running = fit.is_alive()  # before the news, so that the last ones aren't missed
        try:
            news: News = ray.get(desk.news.remote())
        except ray.exceptions.RayError as error:
            raise UserError(
                f'launch.kind = "ray": the cluster is lost ({type(error).__name__}); the same command goes '
                "on from the last checkpoint"
            ) from None
        for method, arguments in news.calls:
            getattr(console, method)(*arguments)
        if news.failure is not None:
            console.close()
            fit.join(_NOTED_SECONDS)
            raise UserError(_in_words(news.failure, run))
        if not running:
            return True
        if stop.signal and not asked:
            asked = True
            ray.get(desk.ask_to_stop.remote(stop.signal))
        if stop.signal and news.silence > _GONE_SECONDS:
            return False
        if not news.placed and news.silence > run.launch.start_timeout:
            console.close()
            there = what_is_there(_nodes(ray), ray.available_resources())
            raise UserError(
                f"launch.start_timeout = {run.launch.start_timeout:g}: {scale.asked_for} found no place, or "
                f"didn't start, in that time; the cluster has {there}; ask for less, add nodes, or wait longer"
            )
        time.sleep(_POLL_SECONDS)


def _outcome(run: Run, fit: _Fit) -> Outcome:
    if fit.error is not None:
        raise UserError(_last_failure(run, fit.error)) from None
    value = fit.result.return_value
    if value is None:
        raise UserError("launch.kind = 'ray': the workers ended without training; their logs say why")
    return Outcome(run.place, value["step"], value["evaluation"], value["stopped_by"])


def _in_words(failure: Any, run: Run) -> str:
    if failure.mistake:
        return failure.text
    log = f"{run.place}/workers/worker_{failure.worker}.log"
    where = f"worker {failure.worker}, on the node {failure.node}, failed, and all were stopped. Its log is {log}"
    return f"{where}\n{failure.text.rstrip()}"


def _last_failure(run: Run, error: BaseException) -> str:
    failures = getattr(error, "worker_failures", {})
    lines = [f"worker {rank}: {how(failure)}" for rank, failure in failures.items()]
    what = "; ".join(lines) or how(error)
    # What goes wrong in Ray Train itself isn't counted.
    used_up = f"launch.max_failures = {run.launch.max_failures} is used up, and " if failures else ""
    return (
        f"{what}; {used_up}training stopped. The logs are in {run.place}/workers; the same command goes on from the "
        "last checkpoint"
    )


def how(error: BaseException) -> str:
    """What became of a worker, in a line."""
    from ray.exceptions import RayTaskError

    cause = getattr(error, "health_check_failure", None) or getattr(error, "controller_failure", None) or error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):  # its own words are a traceback
        cause = cause.cause
    kind = type(cause).__name__
    if "ActorDied" in kind or "ActorUnavailable" in kind:
        return "its process is gone"
    if "NodeDied" in kind:
        return "its node is gone"
    text = str(cause).strip().splitlines()
    return f"{kind}: {text[0]}" if text else kind


def _tell_of_failures(desk: Any, run: Run) -> Any:
    import ray
    from ray.train import UserCallback

    class Teller(UserCallback):
        """Says in the driver's terminal that workers start again, and has Ray Train give up where they won't."""

        def __init__(self) -> None:
            self._count = 0

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            self._count += 1
            what = "; ".join(f"worker {rank}: {how(error)}" for rank, error in worker_exceptions.items())
            again = "the workers start again" if self._count <= run.launch.max_failures else "training stops"
            desk.say.remote([("note", (f"{what} (failure {self._count}): {again}",))])
            if failure := ray.get(desk.failure.remote()):
                raise RuntimeError(_in_words(failure, run))

    return Teller()


def _make_desk(ray: Any) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # Its many calls would bury all else that Ray lists of the job's tasks.
    return ray.remote(num_cpus=0, enable_task_events=False)(Desk).options(scheduling_strategy=here).remote()


@contextmanager
def _folder_for_ray(run: Run) -> Iterator[Path]:
    """Where Ray Train writes: the run directory, but not the copy of a store, as what is there is uploaded."""
    if is_remote(run.run_dir):
        with TemporaryDirectory(prefix="meshwright-ray-", ignore_cleanup_errors=True) as scratch:
            directory = Path(scratch, run.name)
            directory.mkdir()
            yield directory
        return
    directory = run.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    yield directory


def _settings(run: Run, scale: Scale) -> dict[str, str]:
    """Ray Train's for this run."""
    elastic, patience = scale.fewest < scale.most, run.launch.start_timeout
    return {
        # Ray's are made for runs of days: 2 s between looks at the workers.
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{max(run.launch.hang_timeout, 30.0):g}",
        # How long one try to find a place lasts; an elastic run then tries with fewer.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": f"{_ELASTIC_START_SECONDS if elastic else patience:g}",
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0" if is_own_cluster() else "1",  # that has no node to be drained
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
        "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
        "RAY_TRAIN_ENABLE_STATE_TRACKING": "1" if _has_dashboard() else "0",
        "RAY_TRAIN_METRICS_ENABLED": "1" if _has_dashboard() else "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
    }


def _has_dashboard() -> bool:
    import ray

    with suppress(Exception):
        return bool(ray._private.worker.get_dashboard_url())
    return False


def _check_folder(run: Run) -> None:
    if "runtime_resources/working_dir_files" in str(run.directory.absolute()):
        raise UserError(
            f"run_dir = {str(run.directory)!r}: would lie in the copy of the working folder that Ray makes for a job, "
            "and deletes; give an absolute path"
        )


def _nodes(ray: Any) -> list[dict[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _remove_snapshots(directory: Path) -> None:
    # What Ray Train remembers of checkpoints; which there are is told by the run directory alone.
    for name in _SNAPSHOTS:
        (directory / name).unlink(missing_ok=True)
