"""What a byte-pair encoding is trained on."""

from collections.abc import Iterator

from meshwright.data.documents import Document, Source
from meshwright.data.encode import BLOCK_CHARACTERS, LeftOut, Progress, checked, cut, digest_and_size, is_held_out

TRAINING_BYTES = 64 << 20


def training_texts(
    sources: list[tuple[Source, int | None]], held_out: float, normalize: str, stop: bool, progress: Progress
) -> Iterator[str]:
    """About 64 MB of the training documents of all sources, each with the share that its bytes are of all bytes.

    Of a larger corpus, a document is taken when a part of its digest lies below 64 MB's share of the total, so the
    choice is spread over the corpus; where some source's size isn't known, each gives its first documents, all as
    many bytes.

    Arguments:
        sources: the corpora, each with its bytes on disk where they are known.
        held_out: the share of documents that is held out.
        normalize: as `data.normalize`.
        stop: whether a document that can't be used is an error.
        progress: told from time to time.
    """
    sizes = [size for _, size in sources]
    total = sum(size or 0 for size in sizes) if None not in sizes else None
    bound = int(min(1.0, TRAINING_BYTES / total) * 2**64) if total else 1 << 64
    left_out = LeftOut(stop)
    before = documents = 0
    for source, size in sources:
        most = TRAINING_BYTES * ((size or 0) / total if total else 1 / len(sources))
        read = reported = taken = 0
        for document in source.documents():
            document = checked(document, normalize)
            if document.fault:
                left_out.add(document.name, document.fault)
                continue
            digest, text_bytes = digest_and_size(document)
            read += text_bytes
            if read - reported >= BLOCK_CHARACTERS:
                reported = read
                progress("train tokenizer", before + getattr(source, "bytes_read", read), total, 0, documents)
            documents += 1
            if is_held_out(digest, held_out) or int.from_bytes(digest[8:], "big") >= bound:
                continue
            for text in _texts(document):
                yield text
                taken += len(text)
                if taken >= most:
                    break
            if taken >= most:
                break
        before += size or read


def _texts(document: Document) -> Iterator[str]:
    if document.messages:
        return (message["content"] for message in document.turns)
    return cut(document.text)
