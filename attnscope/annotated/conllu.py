"""Read CoNLL-U: dependencies as links in both directions, and coreference (`Entity=` in MISC, as GUM writes it).

Lines are parsed by the library conllu; what a treebank means by them is known here. Words are the syntactic words. The
words of a multiword token have the characters that their forms spell ("do" and "n't" in "don't"); where they spell
something else (French "du" is "de" and "le"), both have all of the token's. Empty nodes are not in the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from operator import attrgetter

from conllu.exceptions import ParseException
from conllu.models import Token
from conllu.parser import DEFAULT_FIELD_PARSERS, parse_line

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.corpus.formats import shorten

COREFERENCE = "coref→antecedent"

Bad = Callable[[int, str], None]
"""Takes down a malformed line: its number and why. It may raise, where there are too many."""

_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")

_PARSERS = {name: DEFAULT_FIELD_PARSERS[name] for name in ("id", "head", "misc")}
"""The fields that are read as more than text."""

_NEW_DOCUMENT = re.compile(r"#\s*newdoc(\s|$)")
"""The comment before the first sentence of a document."""

_ENTITY = re.compile(r"(?P<opens>\()?(?P<name>[^()-]+)[^()]*(?P<closes>\))?")
"""A bracket of a mention, such as (e1-person or e1)."""


@dataclass
class _Sentence:
    """Hold a parsed sentence.

    Attributes:
        begin: The line that it begins on.
        document: The number of its document; 0 = the file has named none so far.
        rows: Its words.
        multiword: Number of the first word of a multiword token -> that of its last word, and the token.
    """

    begin: int
    document: int
    rows: list[Token] = field(default_factory=list)
    multiword: dict[int, tuple[int, Token]] = field(default_factory=dict)


def texts(
    paragraphs: Iterable[tuple[int, str]], source: str, unit: str, bad: Bad
) -> Iterator[AnnotatedText]:
    """Return the annotated texts of a file.

    `paragraphs` are its sentences, the lines of each joined by newlines, with the line that each begins on. With the
    unit "document", the sentences up to the next `# newdoc` are one text. Malformed sentences are skipped.
    """
    sentences = _read_all(paragraphs, bad)
    if unit == "sentence":
        for sentence in sentences:
            yield _text_of([sentence], source)
        return
    for _, document in groupby(sentences, key=attrgetter("document")):
        yield _text_of(list(document), source)


def _read_all(paragraphs: Iterable[tuple[int, str]], bad: Bad) -> Iterator[_Sentence]:
    """Yield the sentences that are well-formed and have words."""
    n_documents = 0
    for begin, block in paragraphs:
        lines = block.split("\n")
        n_documents += any(map(_NEW_DOCUMENT.match, lines))
        try:
            sentence = _read(lines, begin, n_documents)
        except AnnotationError as error:
            bad(error.line or begin, error.reason)
            continue
        # Comments alone are no sentence.
        if sentence.rows:
            yield sentence


def _text_of(sentences: Sequence[_Sentence], source: str) -> AnnotatedText:
    """Return sentences as one text, with a space between two."""
    text = ""
    words: list[Span] = []
    links: list[Link] = []
    mentions: list[tuple[str, list[int]]] = []
    for sentence in sentences:
        # The words and spans of a sentence come after those of the sentences before it.
        first = len(words)
        text, spans = _write(sentence, text)
        words += spans
        text += " "
        links += _dependencies(sentence.rows, first)
        mentions += _mentions(sentence.rows, first)
    links += _coreference(mentions)
    # Sentences of a file that tells of no document may be from anywhere.
    begin = sentences[0].begin
    number = sentences[0].document
    document = f"{source} {number}" if number else None
    return AnnotatedText(text[:-1], tuple(words), tuple(links), source, begin, document=document)


# Sentences


def _read(lines: Sequence[str], begin: int, document: int) -> _Sentence:
    """Return the sentence of some lines.

    Raises:
        AnnotationError: A line is malformed.
    """
    sentence = _Sentence(begin, document)
    rows = sentence.rows
    for number, line in enumerate(lines, begin):
        if line.startswith("#"):
            continue
        try:
            row = parse_line(line, _FIELDS, _PARSERS)
        except ParseException as error:
            raise AnnotationError(f"{error} {shorten(line)}", number) from None
        if "deprel" not in row:
            raise AnnotationError(f"{len(row)} columns, not 10: {shorten(line)}", number)
        # Place each row by its ID: a word, a multiword token or an empty node.
        next_word = len(rows) + 1
        match row["id"]:
            case int(word) if word == next_word:
                rows.append(row)
            case (int(first), "-", int(last)) if first == next_word and first not in sentence.multiword:
                sentence.multiword[first] = last, row
            case (int(), ".", int()):
                pass
            case _:
                raise AnnotationError(f"ID {line.split()[0]} is not where it belongs", number)
    # Each word's head, and the last word of multiword tokens, must be there.
    for row in rows:
        head = row["head"]
        if head is not None and (not 0 <= head <= len(rows) or head == row["id"]):
            raise AnnotationError(f"HEAD {head} of word {row['id']} of {len(rows)}")
    for first, (last, _) in sentence.multiword.items():
        if last > len(rows):
            raise AnnotationError(f"{first}-{last} of a sentence of {len(rows)} words")
    # Reading the mentions refuses brackets that do not match.
    list(_mentions(rows, 0))
    return sentence


def _write(sentence: _Sentence, text: str) -> tuple[str, list[Span]]:
    """Return a text with a sentence's forms after it, and where the sentence's words are."""
    words: list[Span] = []
    while len(words) < len(sentence.rows):
        # Take the next word, or all words of the next multiword token.
        first = len(words)
        last, token = sentence.multiword.get(first + 1, (first + 1, sentence.rows[first]))
        forms = [row["form"] for row in sentence.rows[first:last]]
        start = len(text)
        stop = start + len(token["form"])
        # Forms that spell the token get a part of it each; others share all of it.
        if "".join(forms) == token["form"]:
            words += pairwise(accumulate(map(len, forms), initial=start))
        else:
            words += [(start, stop)] * len(forms)
        text += token["form"]
        if (token["misc"] or {}).get("SpaceAfter") != "No":
            text += " "
    return text.rstrip(" "), words


def _dependencies(rows: Sequence[Token], first: int) -> Iterator[Link]:
    """Link each word to its head, and each head to its dependents; any dependent with the label is right.

    `first` is the number of the first word in the text.
    """
    dependents: dict[tuple[int, str], list[int]] = {}
    for word, row in enumerate(rows, first):
        if row["head"]:
            head = first + row["head"] - 1
            yield Link(f"{row['deprel']}→parent", (word,), (head,))
            dependents.setdefault((head, row["deprel"]), []).append(word)
    for (head, label), words in dependents.items():
        yield Link(f"parent→{label}", (head,), tuple(words))


# Coreference


def _coreference(mentions: Iterable[tuple[str, list[int]]]) -> Iterator[Link]:
    """Link each mention to all earlier ones of its entity."""
    earlier: dict[str, set[int]] = {}
    for entity, words in sorted(mentions, key=lambda mention: mention[1]):
        before = earlier.setdefault(entity, set())
        targets = before.difference(words)
        if targets:
            yield Link(COREFERENCE, tuple(words), tuple(sorted(targets)))
        before.update(words)


def _mentions(rows: Sequence[Token], first: int) -> Iterator[tuple[str, list[int]]]:
    """Yield entity and words of the mentions that `Entity=` brackets; those that are cut in parts are left out.

    A mention is known by its word whose head is outside of it; by all its words where no head is known. GUM writes
    (name-type-…: the entity's name stands before the first dash.
    """
    opened: dict[str, list[int]] = {}
    for word, row in enumerate(rows):
        entity = (row["misc"] or {}).get("Entity") or ""
        for match in _ENTITY.finditer(entity):
            name = match["name"]
            if match["opens"]:
                opened.setdefault(name, []).append(word)
            if not match["closes"]:
                continue
            # A closing bracket ends the latest open mention of its entity.
            if not opened.get(name):
                raise AnnotationError(
                    f"Entity={shorten(entity)} of word {word + 1} closes what is not open"
                )
            inside = range(opened[name].pop(), word + 1)
            # "[" marks one part of a discontinuous mention.
            if "[" in name:
                continue
            # The first word whose head is outside stands for the mention; the head of the root is 0.
            words = [first + number for number in inside]
            for number in inside:
                head = rows[number]["head"]
                if head is not None and head - 1 not in inside:
                    words = [first + number]
                    break
            yield name, words
    for name, unclosed in opened.items():
        if unclosed:
            raise AnnotationError(f"Entity: {name} is never closed")
