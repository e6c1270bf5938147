"""Pages are written in sentences that a reader takes in at once: `docs.prose` measures them."""

import re

import pytest

from docs import generate, prose

PAGES = {page.page: page for page in prose.read_pages()}


@pytest.mark.parametrize("name", sorted(PAGES))
def test_sentences_are_short(name):
    page = PAGES[name]
    assert page.sentences
    longest = max(page.sentences, key=lambda sentence: len(sentence.split()))
    told = f"{page.mean:.1f} words per sentence, {page.long_share:.0%} above {prose.LONG}; the longest: {longest}"
    assert page.mean <= 19, told
    assert page.long_share <= 0.05


def test_the_readme_is_short():
    text = re.sub(r"<!--.*?-->", "", (prose.ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    assert len(text.split()) <= 700


def test_sentences_are_what_a_reader_sees():
    page = "# Title\n\nSee `a b.c` (Clark et al. 2019). It ends. [A link](x.md)?\n\n```bash\nNo.\n```\n- One\n- Two\n"
    assert prose.split_sentences(page) == [
        "See `code` (Clark et al. 2019).",
        "It ends.",
        "A link?",
        "One",
        "Two",
    ]


def test_the_docs_are_short():
    n_words = {
        path: len(path.read_text("utf-8").split()) for path in (prose.ROOT / "docs").glob("**/*.md")
    }
    made = sum(n_words[generate.FOLDER / name] for name in generate.PAGES)
    assert sum(n_words.values()) <= 40_000
    assert made <= 12_000
