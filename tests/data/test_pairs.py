import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from prepared import prepare_one
from small_stores import corpus_of, write_store

from meshwright.config import Run, make_run
from meshwright.config_data import SourceKeys
from meshwright.data.documents import Document
from meshwright.data.encode import digest_and_size, is_held_out
from meshwright.data.examples import TooShort, open_examples
from meshwright.data.loader import TrainData, eval_batches
from meshwright.data.pairs import Pairs
from meshwright.data.prepare import prepare
from meshwright.data.show import look
from meshwright.data.sources import open_source
from meshwright.data.store import Store
from meshwright.errors import UserError
from meshwright.track.view import plain_lines


def turn(role, content):
    return {"role": role, "content": content}


ASKED, GOOD, BAD = turn("user", "Which?"), turn("assistant", "This one."), turn("assistant", "None")
SYSTEM = turn("system", "Be brief.")
WHOLE = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
LONGER = [SYSTEM, turn("user", "Hi"), turn("assistant", "Yes?"), ASKED]


def read(path, **keys):
    return list(open_source(str(path), SourceKeys(chat="chatml", **keys), pairs=True).documents())


def write_pairs(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows_of(count):
    return [
        {"prompt": f"Twice {n}?", "chosen": f"It is {2 * n}.", "rejected": f"No. {'a' * (n % 5)}"} for n in range(count)
    ]


@pytest.fixture
def of_pairs(tmp_path):
    """`of_pairs(corpus, data={…}, …)`: a run on pairs whose store is in the test's own folder."""

    def run(corpus, **sections) -> Run:
        values = {
            "engine": "torch",
            "tokenizer": {"kind": "bytes"},
            "model": {"preset": "gpt2-tiny", "init": "hf:nowhere", **_RESOLVED},
            "lora": {"rank": 2},
            "train": {"sequence_length": 256, "batch_size": 2, "steps": 4},
        }
        data = {"train": str(corpus), "validation": 0.25, "packing": "pairs", "chat": "chatml"}
        data |= {"store": str(tmp_path / "store"), **sections.pop("data", {})}
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
        return make_run({**values, "data": data})

    return run


def _resolved():
    run = make_run({"data": {"train": "x"}, "model": {"preset": "gpt2-tiny"}})
    return run.model.model_dump(exclude={"preset", "init"})


_RESOLVED = _resolved()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
@pytest.mark.parametrize(
    ("row", "before"),
    [
        ({"prompt": "Which?", "chosen": "This one.", "rejected": "None"}, [ASKED]),
        ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, [ASKED]),
        ({"prompt": LONGER, "chosen": [GOOD], "rejected": [BAD]}, LONGER),
        (WHOLE, [ASKED]),
        ({"prompt": None, **WHOLE}, [ASKED]),
        ({"chosen": [*LONGER, GOOD], "rejected": [*LONGER, BAD]}, LONGER),
        ({"prompt": "Which?", **WHOLE}, [ASKED]),
        ({"prompt": LONGER, "chosen": "This one.", "rejected": "None"}, LONGER),
    ],
)
def test_each_form_gives_the_same_pair(tmp_path, kind, row, before):
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_pairs(path, [{"score": 1, **row}])
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"score": 1, **row}]), path)
    elif all(isinstance(value, str) for value in row.values()):
        path.write_text("score,prompt,chosen,rejected\n1,Which?,This one.,None\n", encoding="utf-8")
    else:
        return
    (document,) = read(path)
    assert not document.fault and not document.text
    assert list(document.messages) == [*before, GOOD] and list(document.rejected) == [*before, BAD]


def test_bad_pairs_are_named_and_the_others_stay(tmp_path):
    bad = {
        '{"text": "x"}': "missing field (chosen)",
        json.dumps({"prompt": "x", "chosen": "y"}): "missing field (rejected)",
        json.dumps({"prompt": "x", "chosen": "y", "rejected": None}): "missing field (rejected is null)",
        json.dumps({"chosen": "y", "rejected": "z"}): "missing field (prompt)",
        json.dumps({"prompt": "x", "chosen": 3, "rejected": "z"}): "field isn't text or a list (chosen is a number)",
        json.dumps({"prompt": {}, "chosen": "y", "rejected": "z"}): "field isn't text or a list (prompt is an object)",
        json.dumps({**WHOLE, "rejected": [ASKED]}): "no answer (the last turn of rejected isn't the assistant's)",
        json.dumps({**WHOLE, "chosen": []}): "no answer (the last turn of chosen isn't the assistant's)",
        json.dumps({**WHOLE, "rejected": [ASKED, "x"]}): "field isn't an object (rejected[1] is a text)",
        json.dumps({**WHOLE, "rejected": [ASKED, {"role": "assistant"}]}): "missing field (rejected[1])",
        json.dumps(
            {"prompt": "Why?", **WHOLE}
        ): "two prompts (chosen neither is an answer to prompt nor begins with it)",
        json.dumps({"prompt": "a\0", "chosen": "y", "rejected": "z"}): "NUL byte (at 1)",
        json.dumps({"prompt": "", "chosen": "", "rejected": ""}): "empty",
        json.dumps(
            {"prompt": "x" * 300, "chosen": "y" * 300, "rejected": "z" * 300}
        ): "too large (1,200 bytes; data.max_document_mb = 0.001)",
        json.dumps({"prompt": "x", "chosen": "y", "rejected": "z"}): "",
    }
    (tmp_path / "a.jsonl").write_text("\n".join(bad), encoding="utf-8")
    documents = read(tmp_path, max_document_mb=0.001)
    assert [document.fault for document in documents] == list(bad.values())
    (tmp_path / "b.csv").write_text("prompt,chosen\nx,y\n", encoding="utf-8")
    assert read(tmp_path / "b.csv")[0].fault == "missing field (chosen and rejected; there are prompt, chosen)"


def test_a_store_has_both_texts_of_a_pair_as_one_document(tmp_path, of_pairs):
    rows = [{"prompt": LONGER, "chosen": "This one.", "rejected": "None"}, *rows_of(11)]
    store = prepare_one(of_pairs(write_pairs(tmp_path / "a.jsonl", rows), data={"validation": 0}))
    split, decode = store.split("train"), store.tokenizer().decode
    assert store.has_pairs and store.manifest["pairs"] is True and split.document_count == len(rows)
    tokens, weights = split.document(0), split.read_weights(*split.document_range(0)).astype(int)
    ends = np.flatnonzero(tokens == split.end_of_text)
    assert len(ends) == 2 and ends[1] == len(tokens) - 1
    start = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in LONGER)
    for bit, answer, (first, last) in ((0, "This one.", (0, ends[0])), (2, "None", (ends[0] + 1, ends[1]))):
        assert decode(tokens[first:last].tolist()) == f"{start}<|im_start|>assistant\n{answer}<|im_end|>\n"
        here = weights[first : last + 1]
        assert set(here) == {bit, bit + 1}
        learned = tokens[first : last + 1][here == bit + 1].tolist()
        assert decode(learned[:-1]) == f"{answer}<|im_end|>" and learned[-1] == split.end_of_text


def test_the_last_answer_alone_counts_whatever_the_prompt_holds(tmp_path, of_pairs):
    earlier = [turn("assistant", "one"), ASKED]
    run = of_pairs(
        write_pairs(tmp_path / "a.jsonl", [{"prompt": earlier, "chosen": "This", "rejected": "None"}] * 2),
        data={"validation": 0},
    )
    batch = open_examples(prepare_one(run), "train", run).batch(np.array([0]))
    learned = batch.targets_BT[batch.weights_BT > 0]
    assert bytes(learned[learned < 256].tolist()) == b"This<|im_end|>None<|im_end|>"


def test_an_example_has_the_chosen_text_then_the_rejected_one(tmp_path, of_pairs):
    run = of_pairs(write_pairs(tmp_path / "a.jsonl", rows_of(12)), data={"validation": 0})
    store = prepare_one(run)
    split = store.split("train")
    examples = Pairs(split, 256)
    batch = examples.batch(np.arange(len(examples)))
    assert len(examples) == 12 and examples.left_out == 0
    for row in range(12):
        tokens = split.document(row)
        (border, _) = np.flatnonzero(tokens == split.end_of_text) + 1
        bits = split.read_weights(*split.document_range(row)).astype(int)
        begin = 0
        for segment, here in ((1, slice(0, border)), (2, slice(border, len(tokens)))):
            places = batch.segments_BT[row] == segment
            assert np.flatnonzero(places).tolist() == list(range(begin, begin + places.sum()))
            assert (batch.inputs_BT[row, places] == tokens[here][:-1]).all()
            assert (batch.targets_BT[row, places] == tokens[here][1:]).all()
            assert (batch.weights_BT[row, places] == (bits[here][1:] & 1)).all()
            assert (batch.positions_BT[row, places] == np.arange(places.sum())).all()
            begin += places.sum()
        rest = batch.segments_BT[row] == 0
        assert not batch.weights_BT[row, rest].any() and (batch.inputs_BT[row, rest] == split.end_of_text).all()
        assert begin + rest.sum() == 256
    assert examples.padding == pytest.approx((batch.segments_BT == 0).mean())


def test_pairs_that_do_not_fit_whole_are_left_out_and_said(tmp_path, of_pairs):
    rows = rows_of(12)
    path = write_pairs(
        tmp_path / "a.jsonl", [*rows, {**rows[0], "rejected": "b" * 200}, {**rows[0], "chosen": "c" * 99}]
    )
    notes = []
    run = of_pairs(path, data={"validation": 0}, train={"sequence_length": 192})
    store = prepare_one(run, on_note=notes.append)
    split = store.split("train")
    targets = np.diff(split.document_ends.astype(int), prepend=0) - 2
    assert open_examples(store, "train", run).left_out == (targets > 192).sum() == 2
    assert notes == [
        "pairs left out, longer than train.sequence_length = 192, or with nothing to learn: 2 of 14 for training"
    ]
    fits = int(targets.max())
    assert Pairs(split, fits).left_out == 0 and Pairs(split, fits - 1).left_out == 1
    with pytest.raises(
        TooShort, match=rf"sequence_length = 64: none of the 14 pairs .* shortest of {targets.min()} places"
    ):
        Pairs(split, 64)


def test_a_text_with_nothing_to_learn_leaves_its_pair_out(tmp_path):
    end = [256]
    documents = [[*b"abc", *end, *b"abd"], [*b"abc", *end, *b"abd"], [*b"xyz", *end, *b"ab"]]
    weights = [[0, 1, 1, 1, 2, 3, 3], [0, 1, 1, 1, 3, 2, 2], [0, 0, 1, 1, 2, 2, 3]]
    store = write_store(tmp_path / "store", documents, weights=weights)
    for shard in (tmp_path / "store").glob("train_*.weights"):
        bits = np.fromfile(shard, np.uint8)
        ends = np.cumsum([len(one) + 1 for one in documents]) - 1
        bits[ends] = [3, 2, 3]
        bits.tofile(shard)
    examples = Pairs(Store.open(store.path).split("train"), 16)
    assert len(examples) == 2 and examples.left_out == 1
    assert examples.batch(np.array([1])).inputs_BT[0, :3].tolist() == list(b"xyz")


def test_pairs_are_held_out_and_taken_once_as_wholes(tmp_path, of_pairs):
    rows = rows_of(40)
    path = write_pairs(tmp_path / "a.jsonl", [*rows, rows[3], {**rows[3], "rejected": "another"}])
    store = prepare_one(of_pairs(path, data={"deduplicate": True}))
    assert store.manifest["duplicates"] == 1
    held_out = [is_held_out(digest_and_size(one)[0], 0.25) for one in read(path)]
    assert [store.split(name).document_count for name in ("train", "validation")] == [
        41 - sum(held_out) + held_out[3],
        sum(held_out) - held_out[3],
    ]
    assert 0 < sum(held_out) < 30
    one = read(path)[0]
    swapped = one._replace(messages=one.rejected, rejected=one.messages)
    assert digest_and_size(one)[0] != digest_and_size(swapped)[0] != digest_and_size(one._replace(rejected=()))[0]


def test_several_sources_and_a_held_out_one_give_pairs(tmp_path, of_pairs):
    paths = [write_pairs(tmp_path / f"{name}.jsonl", rows_of(count)) for name, count in (("a", 9), ("b", 5), ("c", 3))]
    train = [{"source": str(path), "weight": 1.0} for path in paths[:2]]
    run = of_pairs("x", data={"train": train, "validation": str(paths[2])})
    corpus = prepare(run)
    assert [store.split("train").document_count for store in corpus.stores] == [9, 5]
    assert [split.document_count for split in corpus.validation] == [3]
    (batch,) = eval_batches(corpus, run.model_copy(update={"train": run.train.model_copy(update={"batch_size": 4})}))
    assert batch.weights_BT.any(axis=1).tolist() == [True, True, True, False]
    both = TrainData(corpus, run).batch(0)
    assert set(np.unique(both.segments_BT)) == {0, 1, 2} and (both.weights_BT.sum(axis=1) > 0).all()


def test_conversations_and_pairs_of_the_same_rows_have_stores_of_their_own(tmp_path, of_pairs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{**row, "messages": [turn("user", row["prompt"]), GOOD]} for row in rows_of(24)]
    path = write_pairs(tmp_path / "a.jsonl", rows)
    pairs, talks = of_pairs(path, data={"store": ""}), of_pairs(path, data={"store": "", "packing": "padded"})
    stores = [prepare_one(run) for run in (pairs, talks)]
    assert stores[0].path != stores[1].path and not stores[1].has_pairs
    assert prepare_one(pairs).path == stores[0].path
    here = of_pairs(path, data={"store": str(stores[1].path)})
    with pytest.raises(UserError, match=r"was made from something else \(.*pairs None there, True here"):
        prepare(here)


def test_a_store_of_pairs_opens_under_no_other_packing(tmp_path, of_pairs):
    run = of_pairs(write_pairs(tmp_path / "a.jsonl", rows_of(24)))
    store = prepare_one(run)
    ready = of_pairs(store.path)
    assert prepare_one(ready).path == store.path
    for packing in ("stream", "padded", "packed"):
        other = of_pairs(store.path, data={"packing": packing})
        for reading in (lambda other=other: prepare(other), lambda other=other: open_examples(store, "train", other)):
            with pytest.raises(
                UserError, match=rf'data.packing = "{packing}": the store \S+ holds pairs of answers; set'
            ):
                reading()
    assert not list(store.path.glob("packed_*"))
    plain = write_store(tmp_path / "plain", [[1, 2, 3]] * 4, [[4, 5, 6]])
    with pytest.raises(UserError, match=r'data.packing = "pairs": the store \S+ holds no pairs of answers; name'):
        open_examples(plain, "train", run)


def test_a_source_from_python_gives_pairs(tmp_path, of_pairs):
    class Mine:
        def describe(self):
            return {"name": "mine", "fingerprint": "1"}

        def documents(self):
            both = Document("a", messages=[ASKED, GOOD], rejected=(ASKED, BAD))
            yield from [both, Document("b", "text"), Document("c", messages=(ASKED, GOOD))]
            yield both._replace(name="other", rejected=(turn("user", "Who?"), BAD))
            yield both._replace(name="same", rejected=(ASKED, GOOD))
            yield Document("d", "text", rejected=(ASKED, BAD))
            yield from [
                both._replace(name="d", rejected=(ASKED,)),
                both._replace(name="e", rejected=(ASKED, GOOD, ASKED)),
            ]

    store = prepare_one(of_pairs("x", data={"validation": 0}), source=Mine())
    assert store.split("train").document_count == 1
    left_out = store.manifest["left_out"]
    faults = {"no turn of the assistant's": 1, "no answer": 1, "two prompts": 1, "the same answer twice": 1}
    assert left_out["kinds"] == {"not a pair": 3, **faults}
    other = of_pairs("x", data={"validation": 0, "packing": "padded", "store": str(tmp_path / "other")})
    assert prepare_one(other, source=Mine()).manifest["left_out"]["kinds"] == {"a pair": 5}


def test_normal_forms_and_trained_tokenizers_see_both_texts(tmp_path, of_pairs):
    rows = [{"prompt": "e\u0301?", "chosen": "e\u0301!", "rejected": "zqzqzq"}] * 3
    path = write_pairs(tmp_path / "a.jsonl", rows)
    sections = {"data": {"validation": 0, "normalize": "nfc"}, "tokenizer": {"kind": "bpe", "vocab_size": 262}}
    store = prepare_one(of_pairs(path, **sections))
    text = store.tokenizer().decode(store.split("train").document(0).tolist())
    assert "é!" in text and "e\u0301" not in text
    assert b"zq" in store.tokenizer().token_bytes()


def test_examples_are_shown_as_chosen_and_rejected(tmp_path, of_pairs):
    path = write_pairs(tmp_path / "a.jsonl", [{"prompt": "Which?", "chosen": "This one.", "rejected": "None"}] * 3)
    run = of_pairs(path, data={"validation": 0}, train={"sequence_length": 192})
    view = look(corpus_of(prepare_one(run)), run, 1)
    lines = list(plain_lines(view))
    assert "  source   " + f"{path}: 447 tokens in 3 pairs" in lines
    start = lines.index("example 1 of step 1: 35 tokens compared")
    assert lines[start + 1 :] == [
        "  + chosen, positions 0 to 75",
        "  | ⟦<|im_start|>user↵⟧",
        "  | ⟦Which?<|im_end|>↵⟧",
        "  | ⟦<|im_start|>assistant↵⟧",
        "  | This one.<|im_end|>⟦↵⟧",
        "  | ⟨<|endoftext|>⟩",
        "  + rejected, positions 0 to 70",
        "  | ⟦<|im_start|>user↵⟧",
        "  | ⟦Which?<|im_end|>↵⟧",
        "  | ⟦<|im_start|>assistant↵⟧",
        "  | None<|im_end|>⟦↵⟧",
        "  | ⟨<|endoftext|>⟩",
        "  + 45 places of padding",
    ]


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"engine": "jax"}, 'engine = "jax": doesn\'t train on pairs .*; set engine = "torch"'),
        ({"lora": {"rank": 0}}, r'lora.rank = 0: under data.packing = "pairs" .*; set a rank'),
        ({"data": {"field": "talk"}}, "data.field = 'talk': .* leave it out"),
        ({"data": {"stream": True, "validation": 0}}, 'data.packing = "pairs": under data.stream it must be "stream"'),
        ({"dpo": {"beta": 0.0}}, "dpo.beta = 0.0: must be greater than 0"),
        ({"dpo": {"beta": 0.3}, "data": {"packing": "padded"}}, 'dpo.beta = 0.3: needs data.packing = "pairs"; set it'),
    ],
)
def test_what_does_not_go_with_pairs_is_one_line(of_pairs, sections, said):
    of_pairs("x")
    with pytest.raises(UserError, match=said) as raised:
        of_pairs("x", **sections)
    assert "\n" not in str(raised.value)


def test_a_template_is_asked_for(tmp_path, of_pairs):
    path = write_pairs(tmp_path / "a.jsonl", rows_of(4))
    with pytest.raises(UserError, match=r"data.chat = '': data.packing = 'pairs' reads conversations.*set it"):
        prepare(of_pairs(path, data={"chat": ""}))
