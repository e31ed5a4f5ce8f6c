"""The section `[data]` of the run file. Imports no framework."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, NonNegativeInt, PositiveFloat, Tag

from meshwright.config_base import NonNegativeFloat, Section


def _share_or_source(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError("a share of documents, at least 0 and less than 1, or the name of a source")
    return value


def _one_or_several(value: Any) -> str:
    return "<several>" if isinstance(value, list) else "<one>"


class SourceKeys(Section):
    """How a source is read."""

    field: str = "text"
    """Key of JSON lines, or column of Parquet, CSV or a dataset, that holds a document's text."""
    separator: str = ""
    """Text between two documents of one text file, such as `<|endoftext|>`; empty: one file is one document."""
    include: list[str] = []
    """Globs on the files' paths, such as `*.rs`; empty: all files."""
    exclude: list[str] = []
    """Globs on the paths of files to leave out."""
    max_document_mb: PositiveFloat = 64.0
    """Megabytes of the largest document; a larger one, and a longer line, is bad input."""
    strip_licence: bool = False
    """Whether to take the licence off the head of source code: a first comment that speaks of copyright or licence."""
    chat: str = ""
    """For conversations: `chatml`, `tokenizer` (the template of an `hf:` one), or the path of a Jinja template."""


class WeightFrom(Section):
    """Another weight from a step on."""

    step: NonNegativeInt
    """The first step that has this weight."""
    weight: NonNegativeFloat
    """As in the source's own `weight`."""


class MixedSource(Section):
    """One source of several; what is left out is as in `[data]`."""

    source: str
    """As `data.train`."""
    weight: NonNegativeFloat = 1.0
    """Its share of the examples, beside the other sources' weights."""
    later: list[WeightFrom] = []
    """Other weights from later steps on, in their order."""
    field: str | None = None
    separator: str | None = None
    include: list[str] | None = None
    exclude: list[str] | None = None
    max_document_mb: PositiveFloat | None = None
    strip_licence: bool | None = None
    chat: str | None = None


class DataSection(SourceKeys):
    """Where text comes from, and how it becomes examples."""

    train: Annotated[
        Annotated[str, Tag("<one>")] | Annotated[list[MixedSource], Tag("<several>"), Field(min_length=1)],
        Discriminator(_one_or_several),
    ]
    """`python-stdlib`, a file, folder, glob, address, `hf:<dataset>` or store; or several with weights (`data.md`)."""
    validation: Annotated[float | str, BeforeValidator(_share_or_source)] = 0.01
    """The share of documents that is held out, or a source of its own."""
    packing: Literal["stream", "padded", "packed", "pairs"] = "stream"
    """`stream`: windows over all tokens. `padded`: a document a row, cut or filled. `packed`: whole ones in a row.
    `pairs`: a chosen and a rejected answer a row, which DPO trains on (`pytorch.md`)."""
    document_mask: bool = True
    """Under `packed`, whether attention stays within a document, whose positions then start from 0."""
    on_bad: Literal["skip", "stop"] = "skip"
    """What to do with input that can't be used: leave it out, count and name it, or stop there."""
    deduplicate: bool = False
    """Whether to keep just the first of documents with the same text."""
    normalize: Literal["none", "nfc", "nfkc"] = "none"
    """Unicode normalisation of the text."""
    processes: NonNegativeInt = 0
    """Processes that make tokens; 0: one a core."""
    stream: bool = False
    """Whether to make tokens as training goes on, from a Ray Data stream, for a corpus too large to prepare."""
    store: str = ""
    """Folder of the token store; empty: `stores/<key>`, where the key names the source and the tokenizer."""

    @property
    def sources(self) -> list[MixedSource]:
        """All sources, each with every key filled in."""
        shared = {key: getattr(self, key) for key in SourceKeys.model_fields}
        listed = self.train if isinstance(self.train, list) else [MixedSource(source=self.train)]
        own = [{key: value for key, value in one.model_dump().items() if value is not None} for one in listed]
        return [MixedSource(**{**shared, **keys}) for keys in own]
