"""Features of descriptions against what they say, on texts whose tokens are known."""

import re

import numpy as np
import pytest

from attnscope.studies.describe.features import FeatureFacts, compute_levels, list_features
from attnscope.text import build_tokens

TEXT = 'The cat sat. "Alice saw the cat," he said.'
TOKENISED = '[CLS] the cat sa ##t . " alice saw the cat , " he said . [SEP]'
PIECES = TOKENISED.split()
IDS = [101, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 9, 6, 10, 11, 5, 102]


def tokens():
    special = [piece[0] == "[" for piece in PIECES]
    spans = []
    end = 0
    for piece, is_special in zip(PIECES, special, strict=True):
        if is_special:
            spans.append((0, 0))
            continue
        letters = piece.removeprefix("##")
        start = TEXT.lower().index(letters, end)
        end = start + len(letters)
        spans.append((start, end))
    return build_tokens(
        TEXT,
        ids=IDS,
        pieces=PIECES,
        offsets=spans,
        special=special,
        segments=[0] * len(IDS),
        style="plain",
    )


def facts(**more):
    read = tokens()
    frequent = np.isin(read.ids, [1, 10])
    return FeatureFacts(read, np.full(len(read), -5.0), frequent, **more)


FEATURES = {feature.name: feature for feature in list_features(["[CLS]", "[SEP]"])}


def levels_of(name, known, query):
    return compute_levels([FEATURES[name]], known, np.array([query]))[0, 0].astype(int)


def keys(name, query, of=None):
    """The keys that a feature holds of."""
    return np.flatnonzero(levels_of(name, of or facts(), query)).tolist()


@pytest.mark.parametrize(
    ("name", "query", "expected"),
    [
        ("self", 4, [4]),
        ("offset-1", 4, [3]),
        ("offset-1", 0, []),
        ("left", 3, [0, 1, 2]),
        ("right", 14, [15, 16]),
        ("within", 2, [0, 1, 2, 3, 4, 5, 6]),
        ("special:[CLS]", 9, [0]),
        ("first", 5, [0]),
        ("resting", 5, [0, 16]),
        ("punctuation", 1, [5, 6, 11, 12, 15]),
        ("sentence_end", 1, [5, 15]),
        ("comma", 1, [11]),
        ("capital", 1, [1, 7]),  # as the text has it, though the tokenizer lowers it
        ("name", 1, []),  # both begin a sentence, one of them after a quotation mark
        ("piece", 1, [4]),
        ("frequent", 1, [1, 9, 13]),
        ("infrequent", 1, [2, 3, 7, 8, 10, 14]),
        ("same", 2, [2, 10]),
        ("same_elsewhere", 2, [10]),
        ("word", 3, [1, 2, 3, 4, 7, 8, 9, 10, 13, 14]),
        ("sentence", 2, [1, 2, 3, 4, 5]),
        ("sentence_start", 4, [1]),
        ("last_punctuation", 8, [6]),
        ("induction", 9, [2]),  # what followed the same token before
        ("induction", 1, []),
        ("line", 4, list(range(1, 16))),
    ],
)
def test_a_feature_holds_of_the_keys_that_it_names(name, query, expected):
    assert keys(name, query) == expected


def test_numbers_go_up_to_their_highest_level_and_no_further():
    embeddings = np.eye(len(IDS), dtype=np.float32)
    embeddings[2] = embeddings[7]
    known = facts(embeddings=embeddings)
    queries = np.arange(len(IDS))
    levels = compute_levels(list(FEATURES.values()), known, queries)
    for feature, block in zip(FEATURES.values(), levels, strict=True):
        assert block.max() < feature.levels, feature.name
    near = levels_of("near", known, 5)
    assert near.argmax() == 5
    assert (np.diff(near[:6]) >= 0).all()
    assert (np.diff(near[5:]) <= 0).all()
    assert not levels_of("near_left", known, 5)[6:].any()
    likeness = levels_of("likeness", known, 2)
    assert likeness[7] == likeness.max() > 0
    assert not likeness[[2, 10]].any()  # the same token is not a token like it


def test_every_feature_has_a_name_of_its_own_words_and_a_share():
    assert len(list_features(["[CLS]", "[SEP]"])) == len(FEATURES)
    for feature in FEATURES.values():
        assert feature.words
        assert feature.levels == 2 or FEATURES[feature.shown_by].levels == 2


def test_lines_and_brackets_of_source_are_features():
    text = "def f(a, [b]):\n  x(\n  y\nz )"
    pieces, spans = zip(
        *((found[0], found.span()) for found in re.finditer(r"\w+|[^\w\s]", text)), strict=True
    )
    n = len(pieces)
    read = build_tokens(
        text,
        ids=range(n),
        pieces=pieces,
        offsets=spans,
        special=[False] * n,
        segments=[0] * n,
        style="plain",
    )
    known = FeatureFacts(read, np.full(n, -5.0), np.zeros(n, np.bool_))

    def seen(name, query):
        return " ".join(pieces[key] for key in keys(name, pieces.index(query), known))

    assert seen("opener", "b") == "["
    assert seen("opener", "a") == "("
    assert seen("opener", "]") == "["
    assert seen("opener", "f") == ""
    assert seen("opener", "z") == "("
    assert seen("line", "y") == "y"
    assert seen("line_start", "(") == "def"


def test_tokens_without_text_have_features_all_the_same():
    bare = build_tokens(
        "",
        ids=[7, 8, 7],
        pieces=["<7>", "<8>", "<7>"],
        offsets=None,
        special=[False] * 3,
        segments=[0] * 3,
        style="plain",
    )
    known = FeatureFacts(bare, np.full(3, -1.0), np.zeros(3, np.bool_))
    levels = compute_levels(list(FEATURES.values()), known, np.arange(3))
    named = dict(zip(FEATURES, levels, strict=True))
    assert np.flatnonzero(named["same_elsewhere"][0]).tolist() == [2]
    assert np.flatnonzero(named["offset-1"][1]).tolist() == [0]
