"""Compressed files as streams: bounded memory, and everything before a break is given."""

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from meshwright.data.optional import optional

CHUNK_BYTES = 1 << 20
INPUT_BYTES = 1 << 17
ENDINGS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"}

# Windows up to 2 GiB (`zstd --long=31`), the largest that the format's own tools write.
_ZSTD_WINDOW = 1 << 31
# zstandard gives all that its input holds, up to 128 KiB for each 4 bytes: little input at a time bounds the output.
_ZSTD_BYTES = 256


class Readable(Protocol):
    """Anything that gives bytes, none at the end."""

    def read(self, size: int, /) -> bytes:
        """At most so many of the next bytes."""


class Broken(Exception):
    """The compressed data ends too early, or isn't valid; `str` is the fault, without details."""


class _Scheme(NamedTuple):
    decoder: Callable[[], Any]
    errors: tuple[type[Exception], ...]


class Decompressed:
    """The content of a compressed stream, of one or more members one behind another.

    Arguments:
        file: the compressed bytes.
        kind: `gzip`, `zstd`, `bzip2` or `xz`.
    """

    def __init__(self, file: Readable, kind: str):
        self._file, self._kind, self._scheme = file, kind, _scheme(kind)
        self._decoder: Any = None
        self._data = b""

    def read(self, size: int, /) -> bytes:
        """About so many of the next bytes (of zstd: perhaps more).

        Raises:
            Broken: there is a break here; all before it was given.
        """
        while True:
            if self._decoder is None and not self._next_member():
                return b""
            try:
                content = self._decoder.decompress(self._data, size)
            except self._scheme.errors:
                raise Broken(f"broken {self._kind}") from None
            self._data = getattr(self._decoder, "unconsumed_tail", b"")
            if self._decoder.eof:
                self._data, self._decoder = self._decoder.unused_data, None
            if content:
                return content
            if self._decoder and not self._data and not self._more():
                raise Broken(f"truncated {self._kind}")

    def _next_member(self) -> bool:
        self._data = self._data.lstrip(b"\0")  # members may be padded
        while not self._data:
            if not self._more():
                return False
            self._data = self._data.lstrip(b"\0")
        self._decoder = self._scheme.decoder()
        return True

    def _more(self) -> bool:
        self._data = self._file.read(INPUT_BYTES)
        return bool(self._data)


class _ZstdDecoder:
    """zstandard's decoder in the form of the standard library's."""

    def __init__(self) -> None:
        zstandard = optional("zstandard", "a .zst file")
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self._input, self._start = b"", 0

    def decompress(self, data: bytes, size: int) -> bytes:
        if data:  # only when all before is used up
            self._input, self._start = data, 0
        parts = []
        while size > 0 and self._start < len(self._input) and not self._decoder.eof:
            end = self._start + _ZSTD_BYTES
            parts.append(self._decoder.decompress(self._input[self._start : end]))
            self._start = end
            size -= len(parts[-1])
        return b"".join(parts)

    @property
    def eof(self) -> bool:
        return self._decoder.eof

    @property
    def unused_data(self) -> bytes:
        return self._decoder.unused_data + self._input[self._start :]


def _scheme(kind: str) -> _Scheme:
    if kind == "gzip":
        return _Scheme(lambda: zlib.decompressobj(wbits=31), (zlib.error,))
    if kind == "bzip2":
        return _Scheme(bz2.BZ2Decompressor, (OSError,))
    if kind == "xz":
        return _Scheme(lzma.LZMADecompressor, (lzma.LZMAError,))
    return _Scheme(_ZstdDecoder, (optional("zstandard", "a .zst file").ZstdError,))
