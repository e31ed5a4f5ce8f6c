"""What training reads: the stores of all sources, and how much of each."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from meshwright.data.store import Split, Store
from meshwright.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Corpus:
    """Open stores that share a tokenizer, at least one.

    Arguments:
        stores: one a source.
        names: of the sources, short and all different.
        weights: of each source, the steps from which a weight holds, with it; the first from step 0.
    """

    stores: list[Store]
    names: list[str]
    weights: list[list[tuple[int, float]]]

    @property
    def fingerprint(self) -> str:
        """Changes when a token, the tokenizer or the order of the sources does; of one source, its store's."""
        if len(self.stores) == 1:
            return self.stores[0].fingerprint
        listed = "\n".join(store.fingerprint for store in self.stores)
        return hashlib.blake2b(listed.encode(), digest_size=32).hexdigest()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that wrote the stores.

        Raises:
            UserError: its files are gone, or it is no longer the one that wrote them.
        """
        return self.stores[0].tokenizer()

    @property
    def vocab_size(self) -> int:
        """The tokenizer's."""
        return self.stores[0].manifest["tokenizer"]["vocab_size"]

    @property
    def highest_id(self) -> int:
        """Of all tokens, which are read, and of what fills rows."""
        splits = [store.split(name) for store in self.stores for name in ("train", "validation")]
        return max(max(split.highest_id, split.end_of_text) for split in splits)

    @property
    def tokenizer_fingerprint(self) -> str:
        """The tokenizer's, without opening it."""
        return self.stores[0].manifest["tokenizer"]["fingerprint"]

    @property
    def path(self) -> Path:
        """Where the store lies; of several, the first."""
        return self.stores[0].path

    @property
    def train_tokens(self) -> int:
        """Training tokens of all sources."""
        return sum(store.split("train").token_count for store in self.stores)

    @property
    def validation(self) -> list[Split]:
        """The validation splits that hold something."""
        splits = [store.split("validation") for store in self.stores]
        return [split for split in splits if split.token_count]
