"""What counts as a copy of a text, and what does not."""

import pytest

from attnscope.corpus import CopyFilter, CorpusText, copies, distinct
from attnscope.report.wording import corpus_notes
from attnscope.studies.heads.study import heads
from tests.heads_helpers import heads_in

CAT = "The old cat sat on the mat, and looked at all the birds outside."


def kept(*texts):
    """Which of the texts are no copies of earlier ones."""
    given = [
        CorpusText(i, "here", i + 1, text=text)
        if isinstance(text, str)
        else CorpusText(i, "here", i + 1, ids=text)
        for i, text in enumerate(texts)
    ]
    seen = CopyFilter()
    left = [text.index for text in distinct(given, seen)]
    assert seen.n_dropped == len(texts) - len(left)
    return left


@pytest.mark.parametrize(
    "copy",
    [
        CAT,
        CAT.upper(),
        "  " + CAT.replace(" ", "\n\t ") + "\n",
        "- " + CAT,
        "12. " + CAT,
        "(b) " + CAT,
        "“ " + CAT,
        "[3] " + CAT,
        "User: " + CAT,
        "Example 7: " + CAT,
    ],
)
def test_the_same_text_in_other_clothes_is_a_copy(copy):
    assert kept(CAT, copy) == [0]
    assert kept(copy, CAT) == [0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # Pairs that differ in a word of their midst, in their first or last one.
        (
            "The developer argued with the designer because he did not like the design.",
            "The developer argued with the designer because she did not like the design.",
        ),
        (
            "The trophy does not fit into the suitcase because it is too big.",
            "The trophy does not fit into the suitcase because it is too small.",
        ),
        (
            "John gave the ball to the girl that he had met in the park.",
            "Mary gave the ball to the girl that he had met in the park.",
        ),
        # Sums of one template, and numbers alone.
        ("What is 23 plus 45?", "What is 31 plus 17?"),
        ("1. 2 + 2", "2. 3 + 4"),
        # Short texts in longer ones.
        ("I like it.", "Oh, I like it."),
        (CAT, " ".join([CAT] * 2)),
        (CAT, "Once upon a time in the west " + CAT),
        ("1: 2", "3: 2"),
        ("Mr. Brown likes his work", "Mrs. Brown likes his work"),
    ],
)
def test_texts_that_say_something_else_are_not(one, other):
    assert kept(one, other) == [0, 1]
    assert kept(other, one) == [0, 1]


@pytest.mark.parametrize(
    ("template", "least"),
    [
        ("The old man bought {n} apples at the market and carried them home.", 58),
        ("I am {n} years old", 58),
        ("The old man bought {word} at the market and carried it home.", 58),
        ("When {word} and {other} went to the store, {word} gave a drink to", 55),
        ("{word} saw the man on the hill with a long telescope.", 58),
        ("I saw the man on the hill with a {word}", 58),
        ("The {word} saw the {other} again.", 58),
        ("My {word} is very {other} now, really.", 58),
        ("Give me the {word}!", 58),
    ],
)
def test_texts_of_one_template_are_copies_from_the_third_on(template, least):
    """A pair may be made to differ; 60 texts of one template are the evidence of one."""
    fill = [{"n": n, "word": f"w{n}", "other": f"v{7 * n % 60}"} for n in range(60)]
    assert 60 - len(kept(*(template.format(**words) for words in fill))) >= least


def test_templates_are_told_among_other_texts():
    others = [" ".join(f"w{i}x{j}" for j in range(12)) for i in range(2000)]
    texts = [
        f"The old man bought {word} at the market and carried it home."
        for word in ("figs", "tea", "rye", "oil")
    ]
    assert kept(texts[0], *others[:999], texts[1], *others[999:], texts[2], texts[3]) == list(
        range(2002)
    )


def test_one_frame_with_two_words_exchanged_gives_no_role(own):
    """Its 80 texts gave 115 roles to MiniLM's heads."""
    animals = ["dog", "cat", "bird", "fox", "cow", "hen", "owl", "ant", "bee"]
    people = ["king", "man", "girl", "boy", "nun", "cook", "maid", "duke", "pope"]
    found = heads(
        own, [f"The {animal} saw the {person} again." for animal in animals for person in people]
    )
    assert found.corpus["n_texts"] == 2
    assert not any(head.roles for head in heads_in(found))


def test_short_texts_share_a_frame_only_at_the_same_places():
    """Two words of six may differ, each at its place; of three words, none."""
    moved = ["The dog saw the girl again.", "Again the dog saw the girl.", "The girl again saw the dog."]
    assert kept(*moved) == [0, 1, 2]
    words = [("ate", "b", "now"), ("saw", "c", "then"), ("bit", "d", "once")]
    three = [f"The dog {verb} the {person} {time}" for verb, person, time in words]
    assert kept("See Jane run.", "See Tom run.", "See Ann run.", *three) == [0, 1, 2, 3, 4, 5]


def test_token_numbers_are_copies_where_all_are_the_same():
    assert kept((1, 2, 3), (1, 2, 3), (1, 2, 3, 4), "1 2 3") == [0, 2, 3]


def test_as_many_are_remembered_as_there_is_room_for(monkeypatch):
    texts = [" ".join(f"w{i}x{j}" for j in range(6)) for i in range(3000)]
    assert len(kept(*texts, *texts)) == 3000
    monkeypatch.setattr(copies, "MAX_DIGESTS", 1024)
    assert kept(*texts) == list(range(3000))  # too many to remember, and no text is lost for it
    assert 3000 < len(kept(*texts, *texts)) <= 6000


def test_copies_change_nothing_but_their_count(own):
    texts = [
        f"{CAT} {' '.join(chr(97 + (i + j * (2 * i + 1)) % 26) for j in range(9))}" for i in range(12)
    ]
    once = heads(own, texts)
    many = heads(own, [f"{n}. {text}" if n else text for n in range(5) for text in texts])
    assert once.corpus["n_copies"] == 0
    assert many.corpus["n_copies"] == 48
    assert many.corpus["n_texts"] == 12
    assert many.as_json()["heads"] == once.as_json()["heads"]
    assert (
        "48 texts are left out: copies of a text count once, and texts of one template twice"
        in corpus_notes(many)
    )
    assert not corpus_notes(once)


def test_lines_of_a_log_are_one_template():
    lines = [
        f"at {i}:{i + 10} host {i} sent {7 * i} bytes to client {90 + i} in {i + 3} ms"
        for i in range(10, 22)
    ]
    assert len(kept(*lines)) == 2
