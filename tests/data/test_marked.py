import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from meshwright.data.marked import SpanEncoder, encode_apart

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "▁": 3, "▁a": 4, "▁ab": 5, "<": 6, "x": 7, ">": 8}
MERGES = [("▁", "a"), ("a", "b"), ("▁a", "b")]


@pytest.fixture
def make():
    def tokenizer(scheme):
        made = Tokenizer(models.BPE(VOCABULARY, MERGES))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        made.add_special_tokens(["<x", "<x>"])
        return made

    return tokenizer


def test_nothing_is_merged_across_a_border_but_within_a_span(make):
    encoder = SpanEncoder(make("never"))
    assert encoder.encode([[("a", True)], [("b", False)]]) == [[0], [1]]
    assert encoder.encode([[("a", True), ("b", False)], [], [("", True)]]) == [[2], [], []]
    assert encoder.encode([]) == []


def test_where_borders_cannot_be_kept_a_token_across_one_belongs_to_the_later_span(make):
    encoder = SpanEncoder(make("always"))
    assert encoder.encode([[("a", True)], [("b", False)], [("b", False)]]) == [[], [5], [1]]


def test_of_special_tokens_the_longest_counts_and_only_where_they_may(make):
    spans = [[("<x>a<x", True), ("<x>", False)], [("<x", True)]]
    tokenizer = make("never")
    long, short = tokenizer.token_to_id("<x>"), tokenizer.token_to_id("<x")
    assert tokenizer.encode("<x>a<x").ids == [long, 0, short]
    expected = [[long, 0, short, 6, 7, 8], [short]]
    assert SpanEncoder(tokenizer).encode(spans) == expected
    ids = {"<x": short, "<x>": long}
    assert encode_apart(spans, ids, lambda text: [VOCABULARY[letter] for letter in text]) == expected


def test_the_tokenizer_stays_as_it_is(make):
    tokenizer = make("first")
    before = tokenizer.to_str()
    SpanEncoder(tokenizer)
    assert tokenizer.to_str() == before
    assert tokenizer.encode("<x").ids != [6, 7]
