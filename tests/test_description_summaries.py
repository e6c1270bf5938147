"""Descriptions in few words: kinds of keys and distances that get more attention are named, the strongest first."""

from types import SimpleNamespace

import numpy as np
import pytest

from attnscope.core.sampled_rows import Column, Rows
from attnscope.results.table import Estimate
from attnscope.studies.describe.english import class_of
from attnscope.studies.describe.features import catalogue
from attnscope.studies.describe.words import Names, _relation, by_distance, by_kind

WORDS = ("the", "she", "door", "key", "fell", "ran", ",", ".")
N_ROWS, N_KEYS = 30, 24
EVEN = np.ones(N_ROWS * N_KEYS)
_ORDER = np.random.default_rng(0).permuted(np.arange(N_KEYS) % len(WORDS))
TYPES = np.concatenate([np.roll(_ORDER, row) for row in range(N_ROWS)])
OFFSETS = np.tile(np.arange(N_KEYS) - N_KEYS // 2, N_ROWS)


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("she", "pronouns"),
        ("kitchen", "nouns"),
        ("walked", "verbs"),
        ("helpful", "adjectives"),
        ("slowly", "adverbs"),
        ("morning", "nouns"),
        ("not", "negations"),
        (",", ""),
    ],
)
def test_a_word_has_one_class(word, name):
    assert class_of(word) == name


def names_of(attention: np.ndarray, columns: tuple[Column, ...] = ()) -> Names:
    """The names of one head's terms in random texts of WORDS; rows are (query, key) at distances of -12 to 11."""
    features = catalogue([])
    flags = np.zeros((len(features), len(TYPES)), np.uint8)
    for number, feature in enumerate(features):
        if feature.name in ("comma", "sentence_end"):
            flags[number] = (6 if feature.name == "comma" else 7) == TYPES
        elif feature.name == "punctuation":
            flags[number] = TYPES >= 6
        elif feature.name == "word":
            flags[number] = TYPES < 6
        elif feature.name in ("determiners", "pronouns", "nouns", "verbs"):
            flags[number] = [class_of(WORDS[t]) == feature.name for t in TYPES]
        elif feature.name == "same":
            flags[number] = np.repeat(TYPES[OFFSETS == 0], N_KEYS) == TYPES
    rows = Rows(
        flags,
        np.array([feature.levels for feature in features]),
        np.arange(N_ROWS + 1) * N_KEYS,
        np.arange(N_ROWS),
        attention[None] / np.repeat(np.add.reduceat(attention, np.arange(N_ROWS) * N_KEYS), N_KEYS),
        key_types=TYPES.astype(np.int32),
        query_types=TYPES[OFFSETS == 0].astype(np.int32),
        columns=(columns,),
    )
    types = SimpleNamespace(ids=np.arange(len(WORDS)), labels=WORDS)
    group = SimpleNamespace(features=features, offsets=OFFSETS.astype(np.int32), types=types)
    return Names(group, rows.select(np.arange(N_ROWS)))  # type: ignore[arg-type]


def test_kinds_are_named_by_how_much_more_attention_they_get():
    attention = np.select([np.isin(TYPES, (2, 3)), TYPES == 5, TYPES >= 6], [4.0, 3.0, 0.1], 1.0)
    said = by_kind(names_of(attention), 0, np.zeros(len(EVEN)))
    assert said.startswith("nouns 2.")
    assert "(door, key)" in said or "(key, door)" in said
    assert said.endswith("), least punctuation")
    assert said.count("×") <= 2


def test_kinds_are_named_given_the_other_terms():
    attention = np.where(np.isin(TYPES, (2, 3)), 4.0, 1.0)
    assert by_kind(names_of(attention), 0, np.log(attention)) == ""


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        (OFFSETS == -1, "the previous token (34%; uniform 4%)"),
        ((OFFSETS > 0) & (OFFSETS <= 4), "up to 4 after ("),
        (np.abs(OFFSETS) <= 2, "up to 2 away ("),
        ((OFFSETS < -4) & (OFFSETS >= -8), "5 to 8 before ("),
        (OFFSETS == 0, "the token itself (34%; uniform 4%)"),
    ],
)
def test_distances_are_named_that_get_more_attention(chosen, words):
    assert by_distance(names_of(np.where(chosen, 12.0, 1.0)), 0, np.zeros(len(EVEN))).startswith(words)


def test_windows_say_whether_the_nearest_keys_come_first():
    window = (OFFSETS > 0) & (OFFSETS <= 4)
    flat, falling, rising = (np.where(window, of, 1.0) for of in (9.0, 20 - 4 * OFFSETS, 10 + 2 * OFFSETS))
    said = [by_distance(names_of(attention), 0, np.zeros(len(EVEN))) for attention in (flat, falling, rising)]
    assert [", ".join(words.split(", ")[1:2]) for words in said] == ["evenly", "nearest first", "farthest first"]


def test_relations_are_said_as_what_they_are():
    def said(weight: float, share: float) -> str:
        return _relation({"words": "the same token", "weight": weight, "share": Estimate(share, baseline=0.1)})

    assert said(1.0, 0.3) == "the same token (30%; uniform 10%)"
    assert said(-1.0, 0.02) == "avoids the same token (2%; uniform 10%)"
    # Less than under uniform attention, though more than the other terms alone would give.
    assert said(1.0, 0.02) == said(-1.0, 0.3) == ""
