"""Groups of real processes: they meet, they hear the first one's word, and none waits for ever."""

import os
import re
import threading

import pytest
from processes import run_processes

from meshwright.launch import devices
from meshwright.launch.group import Alone, Group, GroupError


def meet_and_tell(group: Group) -> dict:
    import jax

    for _ in range(3):
        group.barrier("twice and more")
    mine = {"rank": group.rank, "text": "é\n", "list": [group.rank + 0.5, None]}
    heard = [group.broadcast(mine), group.broadcast(group.rank + 7), group.broadcast(group.rank, name="other")]
    many = sum(group.broadcast(n + 1000 * group.rank, name="many") == n for n in range(600))
    left = len(group._client.key_value_dir_get("meshwright/broadcast/many"))
    group.barrier("end")
    return {
        "place": [group.rank, group.size, group.is_primary],
        "devices": [jax.device_count(), jax.local_device_count()],
        "heard": heard,
        "many": many,
        "gathered": [group.gather([group.rank]), group.gather(group.rank + 5)],
        "left": left,
    }


def test_barriers_and_broadcasts():
    first, second = run_processes(meet_and_tell, workers=2, devices_per_worker=2)
    assert (first["place"], second["place"]) == ([0, 2, True], [1, 2, False])
    for result in (first, second):
        assert result["devices"] == [4, 2]
        assert result["heard"] == [{"rank": 0, "text": "é\n", "list": [0.5, None]}, 7, 0]
        assert result["many"] == 600
        assert result["gathered"] == [[[0], [1]], [5, 6]]
        assert result["left"] <= 256  # keys that all have read are deleted


def threads_meet(group: Group) -> list:
    heard = {}

    def meet(name: str) -> None:
        group.barrier(name)
        heard[name] = group.broadcast(f"{name} {group.rank}", name=name)

    names = ["a", "b", "c"] if group.is_primary else ["c", "b", "a"]
    threads = [threading.Thread(target=meet, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(heard.values())


def test_from_any_thread_in_any_order():
    assert run_processes(threads_meet) == [["a 0", "b 0", "c 0"]] * 2


def give_up(group: Group) -> list:
    messages = []
    if group.is_primary:
        with pytest.raises(GroupError) as caught:
            group.barrier("save", timeout=0.5)
    else:
        with pytest.raises(GroupError) as caught:
            group.broadcast(None, name="step", timeout=0.5)
    messages.append(str(caught.value))
    group.barrier("end")
    return messages


def test_who_waits_in_vain_says_for_what_and_how_long():
    (first,), (second,) = run_processes(give_up)
    assert first.startswith("barrier 'save': worker 0 (of 2, from 0) gave up: not all workers came within 0.5 s")
    assert second.startswith("broadcast 'step': worker 1 (of 2, from 0) gave up: worker 0 sent nothing within 0.5 s")


@pytest.mark.parametrize(("cores", "expected"), [(4, "64"), (96, "96")])
def test_threads_for_all_that_send_and_receive_and_all_cores(monkeypatch, cores, expected):
    monkeypatch.setattr(devices, "core_count", lambda: cores)
    monkeypatch.setattr(devices, "_listen_for_others", lambda address: None)
    monkeypatch.setattr("jax.config.update", lambda *setting: None)
    monkeypatch.setattr("jax.distributed.initialize", lambda *arguments, **more: None)
    for name in ("PJRT_NPROC", "no_grpc_proxy"):
        monkeypatch.setenv(name, "")  # for it to be taken away at the end
        monkeypatch.delenv(name)
    devices.join("127.0.0.1:1", 0, 1)
    assert os.environ["PJRT_NPROC"] == expected


def sum_over_all(group: Group, factor: int) -> float:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    mine = np.arange(2.0, dtype=np.float32) + 2 * group.rank
    values = jax.make_array_from_process_local_data(sharding, mine, (4,))
    total = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.psum(jnp.sum(x), "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(),
        )
    )(values)
    return factor * float(total)


def test_a_sum_over_the_devices_of_both():
    assert run_processes(sum_over_all, workers=2, devices_per_worker=2, arguments=(10,)) == [60.0, 60.0]


def fails_in_one(group: Group) -> None:
    print("process", os.getpid(), flush=True)
    group.barrier("both are here")
    if group.rank == 1:
        raise ValueError("as it should")
    group.barrier("never")


def test_a_function_that_fails_is_shown_and_ends_all():
    with pytest.raises(AssertionError, match="ValueError: as it should") as caught:
        run_processes(fails_in_one)
    pids = re.findall(r"process (\d+)", str(caught.value))
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_a_function_that_takes_too_long_is_killed():
    with pytest.raises(AssertionError, match=r"meet_and_tell failed \(or took 0\.1 s\)"):
        run_processes(meet_and_tell, timeout=0.1)


def test_alone():
    group = Alone()
    group.barrier("nobody else")
    assert (group.rank, group.size, group.is_primary, group.broadcast({"a": 1})) == (0, 1, True, {"a": 1})
    assert group.gather(3) == [3]
