"""What a connection to Ray changes in this process, and what is said where there is none; no cluster is started."""

import logging
import os
import signal
import socket
import threading

import pytest

pytest.importorskip("ray.data")

from ray.exceptions import AuthenticationError, RaySystemError

from meshwright.errors import UserError
from meshwright.launch import ray_cluster


class Ray:
    """What of Ray is called, with the variables that it finds."""

    error: Exception | None = None

    def init(self, **more):
        if self.error:
            raise self.error
        self.variables = dict(os.environ)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: None)


@pytest.fixture
def fake(monkeypatch):
    fake = Ray()
    monkeypatch.setattr("ray.init", fake.init)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr(ray_cluster, "_start_early", lambda: None)
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    return fake


@pytest.fixture
def address():
    """Where something listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def level() -> int:
    """Of what Ray Data shows."""
    (console,) = [one for one in logging.getLogger("ray.data").handlers if one.get_name() == "console"]
    return console.level


def test_what_is_set_for_ray_is_set_back(fake, address):
    before, shown, on_terminate = dict(os.environ), level(), signal.getsignal(signal.SIGTERM)
    theirs = {}
    for place in ("", address):
        with ray_cluster.ray_cluster(place, "launch.kind"):
            assert signal.getsignal(signal.SIGTERM) is on_terminate
            assert level() == logging.CRITICAL != shown
            theirs[place] = fake.variables.items() - before.items()
        assert dict(os.environ) == before and level() == shown
    names = {place: {name.removeprefix("RAY_") for name, _ in items} for place, items in theirs.items()}
    assert names[""] == {"USAGE_STATS_ENABLED", "worker_niceness", "prestart_worker_first_driver"}
    assert names[address] == {"OVERRIDE_JOB_RUNTIME_ENV"}


def test_what_the_user_has_set_stays(fake, monkeypatch):
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "1")
    with ray_cluster.ray_cluster("", "launch.kind"):
        assert fake.variables["RAY_USAGE_STATS_ENABLED"] == "1"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "1"


def test_on_a_connection_of_the_users_all_stays(fake, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    before, shown = dict(os.environ), level()
    with ray_cluster.ray_cluster("", "launch.kind"):
        assert dict(os.environ) == before and level() == shown


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            AuthenticationError("There is no token."),
            r"Ray's token is missing or wrong \(There is no token\); set RAY_AU",
        ),
        (RaySystemError("raylet"), r"no Ray cluster answers there \(System error: raylet\); give the address"),
    ],
)
def test_a_cluster_that_lets_nobody_in(fake, address, error, said):
    fake.error = error
    expected = rf"^launch\.address = '{address}': {said}"
    with pytest.raises(UserError, match=expected), ray_cluster.ray_cluster(address, "launch.kind"):
        pass
