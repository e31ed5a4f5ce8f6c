"""What `examples/cluster` and `docs/cluster.md` have can be used: by KubeRay and Slurm, as far as can be seen without
them, and by Meshwright.

`kuberay_rayjob.json` holds the names and types of those parts of KubeRay's schema that the examples use, so a key that
an example gets anew must be added there, after a look into KubeRay's own.
"""

import json
import re
import shlex
import subprocess
from pathlib import Path

import jsonschema
import pytest
import yaml

import meshwright as mw
from meshwright.launch.by_hand import place_by_hand
from meshwright.launch.ray_scaling import scale_of

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples/cluster"
SCHEMA = json.loads((ROOT / "tests/kuberay_rayjob.json").read_text())
SBATCH = (EXAMPLES / "train.sbatch").read_text()
PAGE = (ROOT / "docs/cluster.md").read_text(encoding="utf-8")
JOBS = ["rayjob-gpu.yaml", "rayjob-tpu.yaml"]


def load(name: str) -> dict:
    return yaml.safe_load((EXAMPLES / name).read_text())


def groups(job: dict) -> list[dict]:
    """The head, then the groups of workers."""
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def pod(group: dict) -> dict:
    return group["template"]["spec"]


def container(group: dict) -> dict:
    (only,) = pod(group)["containers"]
    return only


def mounts(group: dict) -> dict[str, dict]:
    """Volumes by the path where the group's container has them."""
    volumes = {volume["name"]: volume for volume in pod(group)["volumes"]}
    return {mount["mountPath"]: volumes[mount["name"]] for mount in container(group)["volumeMounts"]}


def run_of(job: dict, monkeypatch) -> mw.Run:
    """What the job trains: the run file is in a config map, which is made of the one beside it."""
    program, command, run_file, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert (program, command) == ("meshwright", "train")
    folder, name = run_file.rsplit("/", 1)
    assert "configMap" in mounts(groups(job)[0])[folder]
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)  # which the tests set, and a cluster's head doesn't
    return mw.load_run(EXAMPLES / name, overrides)


def nodes(job: dict) -> list[dict[str, float]]:
    """The nodes that the cluster will have, as Ray lists their resources."""
    names = {"cpu": "CPU", "nvidia.com/gpu": "GPU", "google.com/tpu": "TPU"}
    found = []
    for group in groups(job):
        resources = container(group)["resources"]["limits"]
        node = {names[key]: float(value) for key, value in resources.items() if key in names}
        if "num-cpus" in group["rayStartParams"]:
            node["CPU"] = float(group["rayStartParams"]["num-cpus"])
        found += [node] * group.get("replicas", 1) * group.get("numOfHosts", 1)
    return found


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_as_kuberay_wants_it(name):
    job = load(name)
    jsonschema.validate(job, SCHEMA)
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])
    misspelt = {**job, "spec": {**job["spec"], "entryPoint": "true"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(misspelt, SCHEMA)


@pytest.mark.parametrize("name", JOBS)
def test_the_ray_of_a_job_is_the_one_that_is_tested(name):
    pinned = re.search(r"(?m)^ray==(.+)$", (ROOT / "requirements/test.txt").read_text())[1]
    assert load(name)["spec"]["rayClusterSpec"]["rayVersion"] == pinned
    assert f"rayproject/ray:{pinned}-" in PAGE


@pytest.mark.parametrize("name", JOBS)
def test_what_a_pod_asks_for_is_what_it_may_have(name):
    """Kubernetes refuses accelerators of which more may be had than are asked for."""
    for group in groups(load(name)):
        resources = container(group)["resources"]
        assert resources["requests"] == resources["limits"] and resources["limits"].keys() >= {"cpu", "memory"}
        assert group.get("minReplicas") == group.get("maxReplicas") == group.get("replicas")


@pytest.mark.parametrize("name", JOBS)
def test_run_directory_and_store_lie_on_a_volume_that_all_pods_share(name, monkeypatch):
    job = load(name)
    run = run_of(job, monkeypatch)
    shared = [mounts(group)["/shared"] for group in groups(job)]
    assert all(volume == shared[0] for volume in shared) and "persistentVolumeClaim" in shared[0]
    for path in (run.directory, Path(run.data.store)):
        assert path.is_relative_to("/shared") and path != Path("/shared")


@pytest.mark.parametrize("name", JOBS)
def test_lost_workers_are_started_by_meshwright_and_a_lost_head_by_kuberay(name, monkeypatch):
    job = load(name)
    assert run_of(job, monkeypatch).launch.max_failures >= 1
    # Each try is a new cluster: more than a few, and a run that can't work takes machines for long.
    assert 1 <= job["spec"]["backoffLimit"] <= 3
    assert job["spec"]["shutdownAfterJobFinishes"]


def test_the_gpu_job_fills_its_cluster(monkeypatch):
    job = load("rayjob-gpu.yaml")
    run = run_of(job, monkeypatch)
    scale = scale_of(run, nodes(job))
    assert (scale.platform, scale.fewest, scale.most, scale.devices) == ("gpu", 2, 2, 8)
    assert sum(node.get("GPU", 0) for node in nodes(job)) == scale.most * scale.devices
    assert run.micro_batch_size % (scale.most * scale.devices) == 0
    assert scale_of(run, nodes(job)[:1]) == scale  # the head may be there before the others


def test_the_tpu_job_fills_its_slice(monkeypatch):
    job = load("rayjob-tpu.yaml")
    run, (_, workers) = run_of(job, monkeypatch), groups(job)
    scale = scale_of(run, nodes(job))
    assert (scale.platform, scale.most, scale.devices) == ("tpu", workers["numOfHosts"], 4)
    assert container(workers)["resources"]["limits"]["google.com/tpu"] == str(scale.devices)
    selector = pod(workers)["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-topology"] == run.launch.topology
    generation = selector["cloud.google.com/gke-tpu-accelerator"].split("-")[1]
    assert run.launch.accelerator == f"TPU-{generation.upper()}"
    rows, columns = map(int, run.launch.topology.split("x"))
    assert rows * columns == scale.most * scale.devices
    assert run.micro_batch_size % (rows * columns) == 0


def slurm_option(name: str) -> str:
    return re.search(rf"(?m)^#SBATCH --{name}=(.+)$", SBATCH)[1]


def srun_command() -> list[str]:
    (command,) = re.findall(r"(?m)^srun .*$", SBATCH.replace("\\\n", " "))
    return shlex.split(command)


def test_the_batch_script_is_one_for_bash():
    def check(text: str) -> int:
        return subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).returncode

    assert check(SBATCH) == 0
    assert check(SBATCH + "\nif true\n") != 0
    assert SBATCH.startswith("#!/bin/bash\n")


def test_the_batch_script_starts_a_worker_a_machine():
    words = srun_command()
    run_file, *overrides = words[words.index("train") + 1 :]
    run = mw.load_run(EXAMPLES / run_file, overrides)
    assert run.launch.kind == "processes" and not run.launch.coordinator and run.launch.index == -1
    machines, tasks = int(slurm_option("nodes")), int(slurm_option("ntasks-per-node"))
    for rank in range(machines * tasks):
        variables = {
            "SLURM_JOB_ID": "1234",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NODELIST": "gpu[01-02]",
            "SLURM_STEP_NUM_TASKS": str(machines * tasks),
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{machines})",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % tasks),
            "SLURM_NODEID": str(rank // tasks),
        }
        place = place_by_hand(run, variables)
        assert (place.run.launch.index, place.run.launch.workers) == (rank, machines * tasks)
        assert place.run.launch.coordinator.startswith("gpu01:")
        assert place.variables == {}  # a worker has all cards of its machine
    assert place_by_hand(run, {}) is None
    assert run.micro_batch_size % (machines * int(slurm_option("gpus-per-node"))) == 0


def test_the_batch_script_shares_the_folder_it_was_submitted_from():
    words = srun_command()
    run = mw.load_run(EXAMPLES / "run.toml", words[words.index("train") + 2 :])
    assert not run.directory.is_absolute() and not Path(run.data.store).is_absolute()


def test_the_commands_of_the_page_can_be_given():
    commands = [line for line in PAGE.splitlines() if re.match(r"(ray job submit .*)?meshwright train ", line)]
    assert len(commands) >= 5
    for command in commands:
        words = shlex.split(command)
        overrides = words[words.index("train") + 2 :]
        run = mw.load_run(ROOT / "examples/stdlib.toml", overrides)
        assert run.launch.kind in ("ray", "processes"), command


def test_keys_that_the_page_names_are_keys():
    run = mw.load_run(EXAMPLES / "run.toml").model_dump()
    named = set(re.findall(r"`(data|train|launch|checkpoint|mesh)\.([a-z_]+)\b", PAGE))
    assert len(named) >= 12
    assert {(section, key) for section, key in named if key not in run[section]} == set()


def test_the_table_of_slices_is_as_ray_counts():
    from ray.util.tpu import get_tpu_worker_resources

    rows = re.findall(r"(?m)^\| (\d+) chips.* \| `(\d+x\d+)` \| (\d+) \| (\d+) \|$", PAGE)
    assert len(rows) >= 4
    for chips, topology, hosts, each in rows:
        for accelerator in re.findall(r"`(TPU-[A-Z0-9]+)`", PAGE):
            found, resources = get_tpu_worker_resources(topology=topology, accelerator_type=accelerator, num_slices=1)
            assert (int(hosts), int(each)) == (found, resources["TPU"])
        assert int(chips) == int(hosts) * int(each)
