import json
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.documents import Document
from meshwright.data.encode import Encoder
from meshwright.data.sources import open_source
from meshwright.data.tokenizer import StreamDecoder, load_tokenizer, open_tokenizer, train_bpe
from meshwright.errors import UserError

TEXTS = [
    "def f(x):\n    if x:\n\t\treturn {'a': 1.25e-3}  # ok\n\n\nclass A:\n",
    "naïve café, 你好世界 👩‍👩‍👧 e\u0301\u200b",
    "\x00\x01\x7f\r\n\r \u2028\ufeff\ufffd",
    "    leading, trailing   \n\n",
    "<|endoftext|> <s></s> <0x41> Ġ Ċ",
]
KINDS = ["bytes", "bpe", "tiktoken:gpt2", "hf-bytes", "hf-sentencepiece"]
# U+2581 is SentencePiece's own way to write a space: its tokenizers can't give it back.
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=60)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory, gpt2_files):
    return {kind: _tokenizer(kind, tmp_path_factory.mktemp("tokenizers"), gpt2_files) for kind in KINDS}


def _tokenizer(kind, folder, gpt2_files):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if kind == "bpe":
        return train_bpe([document.text for document in open_source(json.__file__).documents()] + TEXTS, 600)
    if not kind.startswith("hf-"):
        return open_tokenizer(kind)
    if kind == "hf-bytes":
        encoder, merges = map(str, gpt2_files)
        tokenizer = Tokenizer(models.BPE.from_file(encoder, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<|endoftext|>"])
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
        tokenizer.train_from_iterator(["a text of words\n" * 20], trainer)
        # The trainer marks the byte tokens special, which would hide what they stand for.
        form = json.loads(tokenizer.to_str())
        form["added_tokens"] = form["added_tokens"][:3]
        tokenizer = Tokenizer.from_str(json.dumps(form))
        (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    tokenizer.save(str(folder / "tokenizer.json"))
    return open_tokenizer(f"hf:{folder}")


def with_bos(folder, *, added: bool) -> str:
    """A tokenizer that has a beginning of text, which other programs add or not."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    train_bpe(["some text to learn from, " * 20], 270).save(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<bos>"])
    if added:
        special = [("<bos>", tokenizer.token_to_id("<bos>"))]
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<bos>"}))
    return f"hf:{folder}"


@pytest.mark.parametrize("added", [False, True])
def test_documents_begin_with_a_beginning_of_text_if_asked(tmp_path, added):
    kind = with_bos(tmp_path / "their", added=added)
    plain, begun = open_tokenizer(kind), open_tokenizer(kind, add_bos=True)
    bos = plain.special_tokens["<bos>"]
    assert (plain.beginning, begun.beginning, plain.begins_elsewhere) == ([], [bos], added)
    assert plain.encode("text") == begun.encode("text") and bos not in plain.encode("text")
    assert plain.fingerprint != begun.fingerprint
    begun.save(tmp_path / "kept")
    for again in (load_tokenizer(tmp_path / "kept"), pickle.loads(pickle.dumps(begun))):
        assert (again.beginning, again.fingerprint) == ([bos], begun.fingerprint)
    documents = [Document("one", "some text"), Document("two", "more " * 20_000)]
    without, block = (Encoder(one, batch_characters=10_000).encode(documents) for one in (plain, begun))
    starts = np.array([0, block.ends[0]])
    assert (block.tokens[starts] == bos).all()
    assert np.array_equal(np.delete(block.tokens, starts), without.tokens)
    with pytest.raises(UserError, match=r"tokenizer\.add_bos = true: .* has no beginning of text"):
        train_bpe(["x"], 257).save(tmp_path / "none")
        open_tokenizer(f"hf:{tmp_path / 'none'}", add_bos=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes()[i] for i in ids) == text.encode()
    assert [list(batch) for batch in tokenizer.encode_batch([text, "x", text])] == [ids, tokenizer.encode("x"), ids]
    assert max(ids) < tokenizer.vocab_size == len(tokenizer.token_bytes())


@settings(deadline=None, max_examples=200)
@given(text=text, kind=st.sampled_from(KINDS))
def test_any_text_round_trips(tokenizers, text, kind):
    assert tokenizers[kind].decode(tokenizers[kind].encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_in_text_are_text(tokenizers, kind):
    tokenizer = tokenizers[kind]
    marker = "</s>" if kind == "hf-sentencepiece" else "<|endoftext|>"
    ids = tokenizer.encode(f"a{marker}b")
    assert tokenizer.end_of_text not in ids and len(ids) > 3
    assert tokenizer.decode(ids) == f"a{marker}b"
    assert tokenizer.decode([*tokenizer.encode("a"), tokenizer.end_of_text]) == "a"
    assert tokenizer.token_bytes()[tokenizer.end_of_text] == b""


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizers, kind):
    tokenizer = tokenizers[kind]
    assert tokenizer.decode([*tokenizer.encode("ab"), tokenizer.vocab_size + 5]) == "ab"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_opens_as_the_same(tokenizers, kind, tmp_path):
    tokenizer = tokenizers[kind]
    tokenizer.save(tmp_path / "tokenizer")
    again = load_tokenizer(tmp_path / "tokenizer")
    for name in ("kind", "vocab_size", "end_of_text", "fingerprint"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


def test_a_worker_among_many_encodes_in_one_thread(tokenizers, monkeypatch):
    tokenizer, used = tokenizers["tiktoken:gpt2"], set()

    class Watched:
        def encode_to_numpy(self, text, **options):
            used.add(threading.current_thread())
            return np.zeros(len(text))

    monkeypatch.setattr(tokenizer, "_encoding", Watched())
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    assert [len(ids) for ids in tokenizer.encode_batch(["a", "bc"])] == [1, 2]
    assert used == {threading.current_thread()}
    monkeypatch.setenv("RAYON_NUM_THREADS", "2")
    assert [len(ids) for ids in tokenizer.encode_batch(["a", "bc"])] == [1, 2]
    assert len(used) > 1


def test_fingerprints_tell_tokenizers_apart(tokenizers):
    assert len({tokenizer.fingerprint for tokenizer in tokenizers.values()}) == len(KINDS)


def test_a_trained_tokenizer_is_the_same_wherever_it_lies(tokenizers, tmp_path):
    tokenizers["bpe"].save(tmp_path / "here")
    assert open_tokenizer(f"hf:{tmp_path / 'here'}").fingerprint == tokenizers["bpe"].fingerprint


def test_gpt2_of_tiktoken_and_of_hugging_face_agree(tokenizers):
    one, other = tokenizers["tiktoken:gpt2"], tokenizers["hf-bytes"]
    assert type(one) is not type(other)
    assert one.encode("Hello world") == [15496, 995]
    assert one.end_of_text == other.end_of_text == 50256
    for text in TEXTS:
        assert one.encode(text) == other.encode(text)
    assert one.token_bytes() == other.token_bytes()


def test_training_is_deterministic_and_heeds_its_texts():
    texts = [document.text for document in open_source(json.__file__).documents()]
    one, other = train_bpe(texts, 400), train_bpe(iter(texts), 400)
    assert one.fingerprint == other.fingerprint
    assert one.vocab_size == 400
    assert train_bpe([*texts, "zq" * 1000], 400).fingerprint != one.fingerprint


def test_indentation_is_one_token():
    code = "def f():\n        return 1\n" * 50
    assert len(train_bpe([code], 300).encode("():\n        return")) == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_stream_never_gives_half_a_character(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    decoder = StreamDecoder(tokenizer)
    given = text.replace("\ufffd", "")
    parts = [decoder.push(i) for i in tokenizer.encode(given)]
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) + decoder.flush() == given
    if kind == "bytes" and not text.isascii():
        assert "" in parts


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 260), max_size=40))
def test_stream_of_any_ids_is_what_decode_gives(ids):
    tokenizer = open_tokenizer("bytes")
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == tokenizer.decode(ids)


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    cases = {
        "bites": "not a ready-made tokenizer",
        "bpe": "not a ready-made tokenizer",
        "tiktoken:gtp2": "did you mean 'gpt2'?",
        f"hf:{tmp_path / 'none'}": "no such folder",
        f"hf:{tmp_path / 'empty'}": "tokenizer.json",
        f"hf:{tmp_path / 'broken'}": "not a tokenizer",
    }
    for kind, words in cases.items():
        with pytest.raises(UserError, match=words) as caught:
            open_tokenizer(kind)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"tokenizer.vocab_size = 256: must be at least 257"):
        train_bpe(["a"], 256)


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="eos_token"):
        open_tokenizer(f"hf:{tmp_path}")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "b"}')
    assert open_tokenizer(f"hf:{tmp_path}").end_of_text == 1
