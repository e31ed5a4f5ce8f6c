"""The processes that train one model together, as the trainer sees them: a rank, a meeting point, one word for all."""

import json
from collections import defaultdict
from itertools import count
from typing import Any, Protocol, TypeVar

TIMEOUT = 600.0
"""Seconds that a process waits for the others where no other time is given."""

_BROADCASTS_KEPT = 256

Value = TypeVar("Value")


class GroupError(RuntimeError):
    """The processes of a group could not meet: one is late, or gone."""


class Group(Protocol):
    """The processes of a run. Each makes the same calls of a name in the same order, from any one thread."""

    rank: int
    """Which process this is, from 0."""
    size: int
    """How many there are."""

    @property
    def is_primary(self) -> bool:
        """Whether this is the process that speaks and writes for all: rank 0."""
        return self.rank == 0

    def barrier(self, name: str, timeout: float = TIMEOUT) -> None:
        """Wait until every process has come here.

        Arguments:
            name: of the meeting point.
            timeout: seconds after which those who came first give up.

        Raises:
            GroupError: not all came in time, or one is gone.
        """

    def broadcast(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> Value:
        """Learn what rank 0 has.

        Rank 0 doesn't wait for the others, except at every 256th call of a name.

        Arguments:
            value: what JSON can hold; only rank 0's matters.
            name: tells broadcasts of different threads apart.
            timeout: seconds after which to give up.

        Returns:
            Rank 0's value, in every process; with tuples as lists, as JSON has them.

        Raises:
            GroupError: rank 0's value didn't come in time, or a process is gone.
        """

    def gather(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> list[Value]:
        """Learn what every process has.

        Arguments:
            value: what JSON can hold. The service keeps it to the end, so this isn't for what happens often.
            name: tells calls of different threads apart.
            timeout: seconds after which to give up.

        Returns:
            The values by rank.

        Raises:
            GroupError: a value didn't come in time, or a process is gone.
        """


class Alone(Group):
    """A group of one: nothing to wait for."""

    rank = 0
    size = 1

    def barrier(self, name: str, timeout: float = TIMEOUT) -> None:
        """See `Group.barrier`."""

    def broadcast(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> Value:
        """See `Group.broadcast`."""
        return value

    def gather(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> list[Value]:
        """See `Group.gather`."""
        return [value]


ALONE = Alone()


class JaxGroup(Group):
    """The processes of `jax.distributed`; `meshwright.launch.devices.join` makes it.

    Arguments:
        client: of JAX's coordination service. JAX has no public way to it; what it offers in public
            (`jax.experimental.multihost_utils`) runs programs on the devices, which must come in the same order in
            every process and so can't be called beside a training loop, as from the thread that writes a checkpoint.
        rank: of this process.
        size: of the group.
    """

    def __init__(self, client: Any, rank: int, size: int):
        self.rank = rank
        self.size = size
        self._client = client
        self._calls: defaultdict[str, count] = defaultdict(count)

    def barrier(self, name: str, timeout: float = TIMEOUT) -> None:
        """See `Group.barrier`."""
        key = f"meshwright/barrier/{name}/{next(self._calls['barrier ' + name])}"
        try:
            self._client.wait_at_barrier(key, _milliseconds(timeout))
        except RuntimeError as error:
            raise self._failure(f"barrier {name!r}", "not all workers came", timeout, error) from error

    def broadcast(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> Value:
        """See `Group.broadcast`."""
        batch, number = divmod(next(self._calls["broadcast " + name]), _BROADCASTS_KEPT)
        folder = f"meshwright/broadcast/{name}/{batch}"
        text = json.dumps(value) if self.is_primary else ""
        try:
            if self.is_primary:
                self._client.key_value_set(f"{folder}/{number}", text)
            else:
                text = self._client.blocking_key_value_get(f"{folder}/{number}", _milliseconds(timeout))
        except RuntimeError as error:
            raise self._failure(f"broadcast {name!r}", "worker 0 sent nothing", timeout, error) from error
        if number == _BROADCASTS_KEPT - 1:  # the service keeps every key until told: all have read these by now
            self.barrier(f"broadcast {name}", timeout)
            if self.is_primary:
                self._client.key_value_delete(folder)
        return json.loads(text)

    def gather(self, value: Value, name: str = "value", timeout: float = TIMEOUT) -> list[Value]:
        """See `Group.gather`."""
        folder = f"meshwright/gather/{name}/{next(self._calls['gather ' + name])}"
        try:
            self._client.key_value_set(f"{folder}/{self.rank}", json.dumps(value))
            texts = [
                self._client.blocking_key_value_get(f"{folder}/{rank}", _milliseconds(timeout))
                for rank in range(self.size)
            ]
        except RuntimeError as error:
            raise self._failure(f"gather {name!r}", "a worker sent nothing", timeout, error) from error
        return [json.loads(text) for text in texts]

    def _failure(self, what: str, late: str, timeout: float, error: RuntimeError) -> GroupError:
        who = f"{what}: worker {self.rank} (of {self.size}, from 0)"
        if "DEADLINE_EXCEEDED" in str(error):
            return GroupError(f"{who} gave up: {late} within {timeout:g} s; the logs of the others may say why")
        return GroupError(f"{who}: a worker is gone: {str(error).partition(chr(10))[0]}")


def _milliseconds(seconds: float) -> int:
    return max(round(1000 * seconds), 1)
