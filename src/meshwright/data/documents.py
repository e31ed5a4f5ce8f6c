"""What a corpus is: documents in an order that never changes."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol


class Document(NamedTuple):
    """One document, or word of one that can't be used."""

    name: str
    """Where it came from: a path, and for a part of a file `#` and its number or line."""
    text: str = ""
    fault: str = ""
    """Why it can't be used (`text` is then empty): it is left out and counted. A phrase, then details in brackets."""
    messages: tuple[dict[str, str], ...] = ()
    """Of a conversation: `role` and `content` of each turn; `text` is then empty."""
    place: tuple[int, int] = (0, 0)
    """Number of the file and number in the file: where to go on from."""
    rejected: tuple[dict[str, str], ...] = ()
    """Of a pair, the conversation with the rejected answer, as in `messages`, which then has the chosen one."""

    @property
    def turns(self) -> tuple[dict[str, str], ...]:
        """All messages."""
        return (*self.messages, *self.rejected)


class Source(Protocol):
    """A corpus. Iterating it twice must give the same documents in the same order."""

    def describe(self) -> dict[str, Any]:
        """What the corpus is, without reading it.

        Returns:
            `name`, for people; `fingerprint`, which changes when the documents do; and, where known, `bytes`, the
            total size of the text.
        """

    def documents(self) -> Iterator[Document]:
        """Every document, in order; holds one at a time."""


class PlacedSource(Source, Protocol):
    """A corpus that can be read on from a place within it."""

    bytes_read: int
    """Bytes of the last `documents()` so far, those passed over included; the measure of `describe()["bytes"]`."""

    def documents(self, after: tuple[int, int] | None = None) -> Iterator[Document]:
        """Every document, in order.

        Arguments:
            after: the `place` of a document, to begin with the one after it.
        """

    def parts(self) -> "list[PlacedSource]":
        """Sources, one for each file, whose documents one after another are this one's, with the same places."""
