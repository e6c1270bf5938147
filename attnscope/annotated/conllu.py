"""Parse CoNLL-U: dependencies become links in both directions, and so does coreference (`Entity=` in MISC, as in GUM).

The library conllu splits lines into fields; this module makes texts and links of them. Words are the syntactic words of
CoNLL-U, of which a multiword token has several. Where their forms spell the token, each has its own characters ("do"
and "n't" of "don't"); else each has all characters of the token ("de" and "le" of French "du"). Empty nodes are
skipped.
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

OnBadLine = Callable[[int, str], None]
"""Gets the number of a malformed line, and the reason. It may raise an error to end the reading of the file."""

_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")

_PARSERS = {name: DEFAULT_FIELD_PARSERS[name] for name in ("id", "head", "misc")}
"""The parsers of fields that are not plain text here; all others stay strings."""

_NEW_DOCUMENT = re.compile(r"#\s*newdoc(\s|$)")
"""The comment before the first sentence of a document."""

_ENTITY = re.compile(r"(?P<opens>\()?(?P<name>[^()-]+)[^()]*(?P<closes>\))?")
"""The begin of a mention of the entity e1, "(e1-person", or its end, "e1)", or both, "(e1-person)"."""


@dataclass
class _Sentence:
    """Hold a parsed sentence, in which words are numbered from 1, as by their ID.

    Attributes:
        first_line: The number of its first line in the file.
        document: The number of its document, from 1; 0 = the file has named none so far.
        rows: Its words.
        multiword: First word of a multiword token -> its last word, and the token's row.
    """

    first_line: int
    document: int
    rows: list[Token] = field(default_factory=list)
    multiword: dict[int, tuple[int, Token]] = field(default_factory=dict)


def parse(
    paragraphs: Iterable[tuple[int, str]], source: str, unit: str, on_bad_line: OnBadLine
) -> Iterator[AnnotatedText]:
    """Yield the annotated texts of a file; malformed sentences are skipped.

    Args:
        paragraphs: (line number, lines) of each sentence: the number of its first line, and its lines with newlines.
        source: The file's name.
        unit: "sentence": each is a text; "document": the sentences up to the next `# newdoc` are one.
        on_bad_line: Is told of each malformed sentence.
    """
    sentences = _parse_sentences(paragraphs, on_bad_line)
    if unit == "sentence":
        for sentence in sentences:
            yield _join([sentence], source)
        return
    for _, document in groupby(sentences, key=attrgetter("document")):
        yield _join(list(document), source)


def _parse_sentences(
    paragraphs: Iterable[tuple[int, str]], on_bad_line: OnBadLine
) -> Iterator[_Sentence]:
    """Yield the sentences that are well-formed and have words."""
    n_documents = 0
    for first_line, paragraph in paragraphs:
        lines = paragraph.split("\n")
        if any(map(_NEW_DOCUMENT.match, lines)):
            n_documents += 1
        try:
            sentence = _parse_sentence(lines, first_line, n_documents)
        except AnnotationError as error:
            on_bad_line(error.line or first_line, error.reason)
            continue
        # A paragraph of comments has no words.
        if sentence.rows:
            yield sentence


def _join(sentences: Sequence[_Sentence], source: str) -> AnnotatedText:
    """Return sentences as one text, with a space between two."""
    text = ""
    words: list[Span] = []
    links: list[Link] = []
    mentions: list[tuple[str, list[int]]] = []
    for sentence in sentences:
        n_words_before = len(words)
        text, spans = _append_sentence(text, sentence)
        words += spans
        text += " "
        links += _dependencies(sentence.rows, n_words_before)
        mentions += _mentions(sentence.rows, n_words_before)
    links += _coreference(mentions)
    # Without `# newdoc` the sentences of a file may be independent of each other.
    number = sentences[0].document
    document = f"{source} {number}" if number else None
    line = sentences[0].first_line
    return AnnotatedText(text[:-1], tuple(words), tuple(links), source, line, document=document)


# Sentences


def _parse_sentence(lines: Sequence[str], first_line: int, document: int) -> _Sentence:
    """Return the sentence of some lines.

    Raises:
        AnnotationError: A line is malformed.
    """
    sentence = _Sentence(first_line, document)
    rows = sentence.rows
    for number, line in enumerate(lines, first_line):
        if line.startswith("#"):
            continue
        try:
            row = parse_line(line, _FIELDS, _PARSERS)
        except ParseException as error:
            raise AnnotationError(f"{error} {shorten(line)}", number) from None
        if "deprel" not in row:
            raise AnnotationError(f"{len(row)} columns, not 10: {shorten(line)}", number)
        # An ID is that of a word (3), a multiword token (3-4) or an empty node (3.1).
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
    # Refuse heads and ends of multiword tokens that the sentence does not have, and unmatched brackets of mentions.
    for row in rows:
        head = row["head"]
        if head is not None and (not 0 <= head <= len(rows) or head == row["id"]):
            raise AnnotationError(f"HEAD {head} of word {row['id']} of {len(rows)}")
    for first, (last, _) in sentence.multiword.items():
        if last > len(rows):
            raise AnnotationError(f"{first}-{last} of a sentence of {len(rows)} words")
    list(_mentions(rows, 0))
    return sentence


def _append_sentence(text: str, sentence: _Sentence) -> tuple[str, list[Span]]:
    """Return a text with a sentence's tokens after it, and where the sentence's words are in it."""
    spans: list[Span] = []
    while len(spans) < len(sentence.rows):
        # Take the next word, or all words of the next multiword token.
        first = len(spans) + 1
        last = first
        token = sentence.rows[first - 1]
        if first in sentence.multiword:
            last, token = sentence.multiword[first]
        forms = [row["form"] for row in sentence.rows[first - 1 : last]]
        start = len(text)
        text += token["form"]
        # Forms that spell the token have their own characters; others have all of the token's.
        if "".join(forms) == token["form"]:
            spans += pairwise(accumulate(map(len, forms), initial=start))
        else:
            spans += [(start, len(text))] * len(forms)
        if (token["misc"] or {}).get("SpaceAfter") != "No":
            text += " "
    return text.rstrip(" "), spans


def _dependencies(rows: Sequence[Token], n_words_before: int) -> Iterator[Link]:
    """Link each word to its head, and each head to its dependents: all that have one label are targets of one link.

    Words in links have the numbers of the text, where `n_words_before` stand before this sentence.
    """
    dependents: dict[tuple[int, str], list[int]] = {}
    for word, row in enumerate(rows, n_words_before):
        if row["head"]:
            head = n_words_before + row["head"] - 1
            yield Link(f"{row['deprel']}→parent", (word,), (head,))
            dependents.setdefault((head, row["deprel"]), []).append(word)
    for (head, label), words in dependents.items():
        yield Link(f"parent→{label}", (head,), tuple(words))


# Coreference


def _coreference(mentions: Iterable[tuple[str, list[int]]]) -> Iterator[Link]:
    """Link each mention to all earlier mentions of its entity; a mention is (entity, words)."""
    earlier: dict[str, set[int]] = {}
    for entity, words in sorted(mentions, key=lambda mention: mention[1]):
        before = earlier.setdefault(entity, set())
        targets = before.difference(words)
        if targets:
            yield Link(COREFERENCE, tuple(words), tuple(sorted(targets)))
        before.update(words)


def _mentions(rows: Sequence[Token], n_words_before: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (entity, words) of each mention in the brackets of `Entity=`, without discontinuous ones.

    The words are the mention's syntactic head alone, or all of its words if no head is annotated. They have the numbers
    of the text, as in `_dependencies`. GUM writes (name-type-…: the entity's name stands before the first dash.
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
            # "[" marks a piece of a discontinuous mention.
            if "[" in name:
                continue
            # The syntactic head is the first word whose own head is outside the mention, or the root (0).
            words = [n_words_before + index for index in inside]
            for index in inside:
                head = rows[index]["head"]
                if head is not None and head - 1 not in inside:
                    words = [n_words_before + index]
                    break
            yield name, words
    for name, unclosed in opened.items():
        if unclosed:
            raise AnnotationError(f"Entity: {name} is never closed")
