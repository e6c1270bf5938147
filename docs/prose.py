"""How long the sentences of README and docs are: `python -m docs.prose` prints one line per page.

Code blocks, tables, headings, pictures and comments do not count, and neither do pages that are generated lists.
A name or formula in backticks is one word. A list item is at least one sentence.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTS = {"docs/formats.md", "docs/architectures.md"}
LONG = 30
"""A sentence with more words than this is long."""

_NO_PROSE = re.compile(
    r"^```.*?^```|<!--.*?-->|^[ ]*\|[^\n]*|^#[^\n]*|^ {4,}[^\n]*|!\[[^]]*\]\([^)]*\)|</?[a-z]+[^>\n]*>",
    re.MULTILINE | re.DOTALL,
)
_PART = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. ))")
_END = re.compile(r"(?<=[.!?])[\"')*_]*\s+(?=[\"'(*_\[]*[A-Z0-9√Σ`]|\*[a-z])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|et al|vs|cf|Fig|[A-Z])\.$")


@dataclass(frozen=True)
class Prose:
    """The sentences of one page."""

    page: str
    sentences: list[str]

    @property
    def lengths(self) -> list[int]:
        """Words per sentence: the parts between spaces that hold a letter or a digit."""
        return [
            sum(bool(re.search(r"\w", word)) for word in sentence.split()) for sentence in self.sentences
        ]

    @property
    def mean(self) -> float:
        """Words per sentence, on average."""
        return sum(self.lengths) / max(1, len(self.sentences))

    @property
    def long_share(self) -> float:
        """The share of sentences above LONG words, 0 to 1."""
        return sum(length > LONG for length in self.lengths) / max(1, len(self.sentences))


def split_sentences(markdown: str) -> list[str]:
    """The sentences of a page, in order."""
    text = re.sub(r"`[^`\n]+(?:\n[^`\n]+)?`", "`code`", _NO_PROSE.sub("\n", markdown))
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    sentences: list[str] = []
    for part in _PART.split(text):
        line, start = " ".join(re.sub(r"^\s*(?:[-*>]|\d+\.) ", "", part).split()), 0
        for end in _END.finditer(line):
            if not _ABBREVIATION.search(line[start : end.start()]):
                sentences.append(line[start : end.start()])
                start = end.end()
        sentences.append(line[start:])
    return [sentence for sentence in sentences if re.search(r"\w", sentence)]


def read_pages() -> list[Prose]:
    """README and every page of docs that is prose."""
    paths = {
        str(path.relative_to(ROOT)): path
        for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    }
    return [
        Prose(name, split_sentences(path.read_text("utf-8")))
        for name, path in paths.items()
        if name not in LISTS
    ]


def main() -> None:
    """Prints words per sentence and the share of long sentences, for each page and for all."""
    pages = read_pages()
    whole = Prose("all", [sentence for page in pages for sentence in page.sentences])
    for page in [*pages, whole]:
        print(
            f"{page.page:34} {len(page.sentences):5} sentences {page.mean:5.1f} words {page.long_share:4.0%} long"
        )


if __name__ == "__main__":
    main()
