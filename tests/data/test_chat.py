import functools
import os
import pickle
import subprocess
import sys

import chat_templates as templates
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.chat import make_template
from meshwright.data.tokenizer import open_tokenizer, train_bpe
from meshwright.errors import UserError

STYLES = {
    "qwen": templates.QWEN,
    "llama": templates.LLAMA,
    "zephyr": templates.ZEPHYR,
    "instruct": templates.INSTRUCT,
    "generation": templates.GENERATION,
}
SPACES = ["always", "first", "never", "normalizer"]


def said(*contents, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


SYSTEM = [{"role": "system", "content": "Answer in verse."}]
TOOLS = [
    *said("How warm is it?", "I'll look."),
    {"role": "tool", "content": '{"warm": "<b>3</b>"}'},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "Three."},
]
TALKS = [
    said("Hello, world!", "Hello."),
    said("naïve café 你好 👩‍👩‍👧", "(1 + 2) * 3 = 9\n\n\tYes?", "and\n\nso\non", "def f(x):\n    return x\n"),
    said("one", "two", "three"),
]
ONCE = {
    "qwen": (
        "<|im_start|>system\nBe of use.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n",
        "two<|im_end|>",
    ),
    "llama": (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\none<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "two<|eot_id|>",
    ),
    "zephyr": ("<|user|>\none</s>\n<|assistant|>\n", "two</s>"),
    "instruct": ("<|begin_of_text|>[INST] one [/INST]", " two</s>"),
    "generation": ("<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n", "two<|im_end|>"),
}


class Pair:
    """A tokenizer of ours with its template, and the same files in `transformers`."""

    def __init__(self, folder):
        from transformers import PreTrainedTokenizerFast

        self.tokenizer = open_tokenizer(f"hf:{folder}")
        self.template = make_template("tokenizer", self.tokenizer)
        self.other = PreTrainedTokenizerFast.from_pretrained(folder)

    def ids(self, messages, **how):
        return self.other.apply_chat_template(messages, tokenize=True, return_dict=False, **how)

    def text(self, messages, **how):
        return self.other.apply_chat_template(messages, tokenize=False, **how)

    def decode(self, ids):
        return self.other.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def learned(self, messages):
        ids, weights = self.template.encode(messages)
        assert len(ids) == len(weights)
        return self.decode([i for i, weight in zip(ids, weights, strict=True) if weight])


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    made = {name: Pair(templates.write_byte_level(folder / name, text)) for name, text in STYLES.items()}
    for spaces in SPACES:
        made[spaces] = Pair(templates.write_sentencepiece(folder / spaces, templates.INSTRUCT, spaces))
    return made


@pytest.mark.parametrize("style", [*STYLES, *SPACES])
def test_ids_are_those_of_transformers(pairs, style):
    pair = pairs[style]
    talks = TALKS if style in ("instruct", *SPACES) else [*TALKS, SYSTEM + TALKS[0], TALKS[0] + TALKS[0][1:]]
    for messages in [*talks, *([TOOLS] if style == "qwen" else [])]:
        assert pair.template.encode(messages)[0] == pair.ids(messages)


@pytest.mark.parametrize("style", STYLES)
def test_what_is_learned_is_what_the_assistant_says_and_its_end(pairs, style):
    pair = pairs[style]
    before, answer = ONCE[style]
    assert pair.text(said("one", "two")).startswith(before + answer)
    assert pair.learned(said("one", "two")) == answer
    assert pair.learned(said("one", "two", "two", "four", "five")) == answer + answer.replace("two", "four")
    assert pair.learned(said("assistant", "assistant")) == answer.replace("two", "assistant")
    assert pair.learned(said("one", "")) == answer.replace("two", "")


@pytest.mark.parametrize("spaces", SPACES)
def test_spaces_that_a_tokenizer_puts_before_text_come_out_once(pairs, spaces):
    messages = said("one", "two  three", "four", " five")
    pair = pairs[spaces]
    assert pair.template.encode(messages)[0] == pair.ids(messages)
    spelt = pair.tokenizer.token_bytes()
    learned = [i for i, weight in zip(*pair.template.encode(messages), strict=True) if weight]
    # The one space before each answer is the template's.
    assert b"".join(spelt[i] or b"</s>" for i in learned) == b" two  three</s>  five</s>"


def test_generation_tags_mark_the_same_tokens(pairs):
    pair = pairs["generation"]
    for messages in [*TALKS, SYSTEM + TALKS[1]]:
        marked = pair.other.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        assert pair.template.encode(messages) == (marked["input_ids"], marked["assistant_masks"])
        assert 0 < sum(marked["assistant_masks"]) < len(marked["assistant_masks"])


@pytest.mark.parametrize("style", STYLES)
def test_a_prompt_has_the_same_ids_in_training(pairs, style):
    pair = pairs[style]
    for answer in ("two", "\n\ntwo", "  two", ""):
        prompt = pair.ids(said("one"), add_generation_prompt=True)
        ids, weights = pair.template.encode(said("one", answer))
        assert ids[: len(prompt)] == prompt
        assert not any(weights[: len(prompt)])


def test_a_system_message_may_come_before_an_assistant_that_opens(pairs):
    for style in ("qwen", "llama", "zephyr"):
        pair = pairs[style]
        opening = said("Welcome.", "one", "two", first="assistant")
        assert pair.learned(opening) == "".join(ONCE[style][1].replace("two", said) for said in ("Welcome.", "two"))
        assert pair.template.encode(opening)[0] == pair.ids(opening)


@pytest.mark.parametrize("template", [templates.ZEPHYR, templates.PHI])
def test_special_tokens_that_take_the_line_break_after_them(tmp_path, template):
    pair = Pair(templates.write_sentencepiece(tmp_path, template, "first", rstrip=True))
    assert "\n" not in pair.decode(pair.ids(said("one"))).partition("one")[0]
    for messages in (TALKS[0], said("\n one", "two")):
        assert pair.template.encode(messages)[0] == pair.ids(messages)


LOOK_ALIKES = st.sampled_from([*templates.SPECIAL, "<|im_", "end|>", "<think>", "</think>", "[INST]"])
WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"), max_size=12)
CONTENT = st.lists(st.one_of(LOOK_ALIKES, WORDS, st.sampled_from(["\n", " ", "👩‍👩‍👧", ""])), max_size=6).map("".join)


@settings(deadline=None, max_examples=150)
@given(contents=st.lists(CONTENT, min_size=2, max_size=4), style=st.sampled_from(list(STYLES)))
def test_whatever_messages_hold_is_text(pairs, contents, style):
    pair = pairs[style]
    messages = said(*contents)
    ids, weights = pair.template.encode(messages)
    special = set(pair.tokenizer.special_tokens.values())
    assert pair.decode(ids) == pair.text(messages)
    plain = pair.ids(said(*("x" for _ in contents)))
    assert [i for i in ids if i in special] == [i for i in plain if i in special]
    answers = messages[1::2]
    learned = "".join(ONCE[style][1].replace("two", message["content"]) for message in answers)
    if style == "llama":
        learned = "".join(message["content"].strip() + "<|eot_id|>" for message in answers)
    assert pair.decode([i for i, weight in zip(ids, weights, strict=True) if weight]) == learned


@settings(deadline=None, max_examples=50)
@given(contents=st.lists(CONTENT, min_size=2, max_size=4), spaces=st.sampled_from(SPACES))
def test_look_alikes_change_nothing_around_them(pairs, contents, spaces):
    pair = pairs[spaces]
    special = set(pair.tokenizer.special_tokens.values())
    ids, _ = pair.template.encode(said(*contents))
    assert [i for i in ids if i in special] == [i for i in pair.ids(said(*("x" for _ in contents))) if i in special]
    # A tokenizer that has no such special tokens shows what ordinary text is encoded as.
    harmless = [content.replace("<", "{").replace("|", "!") for content in contents]
    ids, _ = pair.template.encode(said(*harmless))
    text = pair.text(said(*harmless))
    assert pair.decode(ids) == pair.decode(pair.other(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("style", ["qwen", "always"])
def test_a_look_alike_is_encoded_as_in_a_document(pairs, style):
    pair = pairs[style]
    content = "Say <|user|></s> and stop"
    within = pair.tokenizer.encode(content)
    ids, _ = pair.template.encode(said("one", content))
    assert any(ids[i : i + len(within)] == within for i in range(len(ids)))
    assert pair.tokenizer.special_tokens["</s>"] not in within


@functools.cache
def without_marks(kind):
    return train_bpe([templates.TEXT], 400) if kind == "bpe" else open_tokenizer(kind)


@pytest.mark.parametrize("kind", ["bytes", "tiktoken:gpt2", "bpe"])
@settings(deadline=None, max_examples=50)
@given(contents=st.lists(CONTENT, min_size=2, max_size=4))
def test_chatml_where_its_marks_are_ordinary_text(kind, contents):
    tokenizer = without_marks(kind)
    messages = SYSTEM + said(*contents)
    ids, weights = make_template("chatml", tokenizer).encode(messages)
    shown = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    assert tokenizer.decode(ids) == "".join(shown)
    assert tokenizer.end_of_text not in ids
    learned = "".join(message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant")
    assert tokenizer.decode(i for i, weight in zip(ids, weights, strict=True) if weight) == learned


def test_chatml_needs_no_jinja_and_is_what_a_template_of_it_gives(pairs, tmp_path):
    pair = pairs["generation"]
    for messages in [*TALKS, said("<|im_end|>", " <|im_end|> ")]:
        assert make_template("chatml", pair.tokenizer).encode(messages) == pair.template.encode(messages)
    code = "import sys; sys.modules['jinja2'] = None\n" + (
        "from meshwright.data.chat import make_template\nfrom meshwright.data.tokenizer import ByteTokenizer\n"
        "make_template('chatml', ByteTokenizer())\nmake_template(sys.argv[1], ByteTokenizer())"
    )
    (tmp_path / "chat.jinja").write_text(templates.PLAIN)
    run = [sys.executable, "-c", code, str(tmp_path / "chat.jinja")]
    done = subprocess.run(run, capture_output=True, text=True, env=os.environ, timeout=60)
    assert "needs Jinja; pip install 'meshwright[datasets]'" in done.stderr.splitlines()[-1]


def test_a_template_file_with_a_tokenizer_that_has_only_end_of_text(tmp_path):
    (tmp_path / "zephyr.jinja").write_text(templates.ZEPHYR)
    for kind in ("bytes", "tiktoken:gpt2"):
        tokenizer = open_tokenizer(kind)
        template = make_template(str(tmp_path / "zephyr.jinja"), tokenizer)
        ids, weights = template.encode(said("<|endoftext|>?", "No: <|endoftext|>"))
        assert ids.count(tokenizer.end_of_text) == 2
        learned = [i for i, weight in zip(ids, weights, strict=True) if weight]
        assert learned[-1] == tokenizer.end_of_text
        assert tokenizer.decode(learned) == "No: <|endoftext|>"


def test_a_template_without_marks_or_prompt(tmp_path):
    (tmp_path / "plain.jinja").write_text(templates.PLAIN)
    tokenizer = open_tokenizer("bytes")
    ids, weights = make_template(str(tmp_path / "plain.jinja"), tokenizer).encode(said("Hi", "Assistant", "skip", "A"))
    assert tokenizer.decode(ids) == "User: Hi\nAssistant: Assistant\nAssistant: A\n"
    assert tokenizer.decode(i for i, weight in zip(ids, weights, strict=True) if weight) == " Assistant\n A\n"


def test_a_template_may_look_at_what_messages_say(tmp_path):
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}{{ m.content[2:-1] ~ (m.content | length) }}\n{% endfor %}"
    )
    tokenizer = open_tokenizer("bytes")
    ids, _ = make_template(str(tmp_path / "chat.jinja"), tokenizer).encode(said("I: <|endoftext|>.", "A: 1."))
    assert tokenizer.decode(ids) == " <|endoftext|>17\n 15\n" and tokenizer.end_of_text not in ids


def test_only_an_assistant_in_the_last_place_teaches_the_end(pairs):
    template = pairs["qwen"].template
    assert template.end_weight(said("one", "two")) == 1
    assert template.end_weight(said("one", "two", "three")) == 0


FAULTS = {
    "no messages": [],
    "messages of an unknown structure (message 1 isn't an object)": ["hello"],
    "messages of an unknown structure (message 2 has no text as 'content')": [*said("one"), {"role": "assistant"}],
    "messages of an unknown structure (message 1 has no text as 'role')": [{"role": None, "content": "x"}],
    "messages of an unknown structure (message 1 has a role that isn't a word)": [{"role": "<|x|>", "content": "x"}],
    "holds half a character (a lone surrogate) (message 2)": said("one", "\ud800"),
    "no turn of the assistant's": said("one"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_messages(pairs, fault):
    for template in (pairs["qwen"].template, make_template("chatml", open_tokenizer("bytes"))):
        with pytest.raises(ValueError) as caught:
            template.encode(FAULTS[fault])
        assert str(caught.value) == fault


def test_faults_of_templates(pairs, tmp_path):
    with pytest.raises(ValueError) as caught:
        pairs["instruct"].template.encode(said("one", "two", first="assistant"))
    assert str(caught.value) == "the chat template refuses it (Roles must alternate user and assistant)"
    cases = {
        templates.FORGETFUL: "changes earlier turns when later ones are added (message 2)",
        "{{ messages | length }}" + templates.PLAIN: "changes earlier turns when later ones are added (message 2)",
        templates.PLAIN + "{% if add_generation_prompt %}Bot:{% endif %}": "opens an answer in another way than it",
        "{% if not add_generation_prompt %}" + templates.PLAIN + "{% endif %}": "changes earlier turns when later",
        templates.PLAIN.replace("message.content }}", "message.content | upper }}"): "rewrites special tokens",
        "{{ messages[0].content.x.y }}": "refuses it ('str object' has no attribute 'x')",
        "{{ ''.__class__.__mro__ }}": "refuses it (access to attribute '__class__' of 'str' object is unsafe",
        "{% set _ = messages.append(1) %}": "refuses it (access to attribute 'append' of 'list'",
    }
    thought = said("one", "<think>hm</think>two", "three <|endoftext|>", "four")
    for text, fault in cases.items():
        (tmp_path / "chat.jinja").write_text(text)
        template = make_template(str(tmp_path / "chat.jinja"), open_tokenizer("bytes"))
        with pytest.raises(ValueError) as caught:
            template.encode(thought)
        assert str(caught.value).startswith("the chat template ") and fault in str(caught.value), text
    (tmp_path / "chat.jinja").write_text(templates.FORGETFUL)
    assert make_template(str(tmp_path / "chat.jinja"), open_tokenizer("bytes")).encode(thought[:2])


def test_mistakes_are_one_line(tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for x in messages %}\n{{ x. }}\n{% endfor %}")
    (tmp_path / "filter.jinja").write_text("\n\n{{ messages | shout }}")
    (tmp_path / "latin.jinja").write_bytes(b"\xff")
    cases = {
        "tokenizer": "the tokenizer 'bytes' has no chat template; choose `chatml`",
        str(tmp_path / "none.jinja"): "No such file",
        str(tmp_path): "Is a directory",
        str(tmp_path / "latin.jinja"): "not UTF-8",
        str(tmp_path / "broken.jinja"): "can't parse line 2 of the template (expected name or number)",
        str(tmp_path / "filter.jinja"): "can't parse line 3 of the template (No filter named 'shout'",
    }
    for chat, words in cases.items():
        with pytest.raises(UserError) as caught:
            make_template(chat, open_tokenizer("bytes"))
        assert str(caught.value).startswith(f"data.chat = {chat!r}: ") and words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_it_can_be_sent_to_another_process(pairs):
    for style in ("qwen", "always"):
        pair = pairs[style]
        messages = said("</s> one", "two </s>")
        again = pickle.loads(pickle.dumps(pair.template))
        assert again.encode(messages) == pair.template.encode(messages)
        assert again.identity() == pair.template.identity()
        tokenizer = pickle.loads(pickle.dumps(pair.tokenizer))
        assert tokenizer.encode("a</s>b") == pair.tokenizer.encode("a</s>b")
        assert tokenizer.end_of_text not in tokenizer.encode("a</s>b")


def test_identity_follows_the_text_and_what_it_depends_on(pairs, tmp_path):
    same = tmp_path / "same.jinja"
    same.write_text(pairs["qwen"].other.chat_template)
    assert make_template(str(same), pairs["qwen"].tokenizer).identity() == pairs["qwen"].template.identity()
    made = [pairs[style].template for style in (*STYLES, "always")]
    made += [make_template("chatml", pairs["qwen"].tokenizer), make_template(str(same), open_tokenizer("bytes"))]
    assert len({template.identity() for template in made}) == len(made)


def test_the_date_is_always_the_same(tmp_path):
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%d %b %Y %H:%M:%S.%f') }}\n" + templates.PLAIN)
    template = make_template(str(tmp_path / "dated.jinja"), open_tokenizer("bytes"))
    ids, _ = template.encode(said("one", "two"))
    assert open_tokenizer("bytes").decode(ids).startswith("01 Jan 2025 00:00:00.000000\n")
