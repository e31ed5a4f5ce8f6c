import json

import pyarrow
import pyarrow.parquet
import pytest

from meshwright.config_data import SourceKeys
from meshwright.data.sources import open_source

TURNS = [{"role": "user", "content": "grüß dich"}, {"role": "assistant", "content": "hallo"}]
PAIR = {"prompt": "grüß dich", "completion": "hallo"}


def documents(path, **keys):
    return list(open_source(str(path), SourceKeys(chat="chatml", **keys)).documents())


@pytest.mark.parametrize("row", [{"messages": TURNS}, PAIR, {"messages": None, **PAIR}, {"talk": TURNS}])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_each_form_gives_the_same_conversation(tmp_path, row, kind):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text(json.dumps({"id": 1, **row}) + "\n", encoding="utf-8")
    elif kind == "parquet" and len(row) < 3:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"id": 1, **row}]), path)
    elif row == PAIR:
        path.write_text("id,prompt,completion\n1,grüß dich,hallo\n", encoding="utf-8")
    else:
        return
    (document,) = documents(path, **({"field": "talk"} if "talk" in row else {}))
    assert list(document.messages) == TURNS and not document.text and not document.fault


def test_other_keys_of_a_turn_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{**turn, "name": "x"} for turn in TURNS]}), "utf-8")
    assert list(documents(tmp_path)[0].messages) == TURNS


def test_bad_conversations_are_named_and_the_others_stay(tmp_path):
    bad = {
        '{"text": "x"}': "missing field (messages, or prompt and completion)",
        '{"prompt": "x"}': "missing field (completion)",
        '{"prompt": "x", "completion": 3}': "field isn't text (completion is a number)",
        '{"messages": "x"}': "field isn't a list (messages is a text)",
        '{"messages": ["x"]}': "field isn't an object (messages[0] is a text)",
        '{"messages": [{"role": "user"}]}': "missing field (messages[0])",
        '{"messages": [{"content": "x"}]}': "missing field (role of messages[0])",
        '{"messages": [{"role": "user", "content": null}]}': "missing field (messages[0] is null)",
        '{"messages": [{"role": "user", "content": "a\\u0000"}]}': "NUL byte (at 1)",
        '{"messages": [{"role": "user", "content": "\\ud83d"}]}': "lone surrogate (half a character, at 0)",
        '{"messages": []}': "empty",
        '{"prompt": "", "completion": ""}': "empty",
        json.dumps({"prompt": "x" * 600, "completion": "y" * 300}): "",
    }
    (tmp_path / "a.jsonl").write_text("\n".join(bad), encoding="utf-8")
    (tmp_path / "b.txt").write_text("x", encoding="utf-8")
    *rows, text = documents(tmp_path, max_document_mb=0.001)
    assert [document.fault for document in rows] == list(bad.values())
    assert text.fault.startswith("not a conversation (") and text.name == "b.txt"


def test_a_conversation_that_is_too_large(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": [TURNS[0]] * 200}]), tmp_path / "a.parquet")
    (document,) = documents(tmp_path, max_document_mb=0.001)
    assert document.fault == "too large (2,200 bytes; data.max_document_mb = 0.001)"
