"""Parse CoNLL-U: dependencies become links in both directions, and so does coreference (`Entity=` in MISC, as in GUM).

The library conllu splits lines into fields. This module builds texts and links from the fields. Words are the syntactic
words of CoNLL-U; a multiword token has several. If the forms of these words spell the token, each word has its own
characters ("do" and "n't" of "don't"). If not, each word has all characters of the token ("de" and "le" of French
"du"). Empty nodes are skipped.
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
"""A function of a malformed line's number and the reason. It may raise an error to end the reading of the file."""

_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")

_PARSERS = {name: DEFAULT_FIELD_PARSERS[name] for name in ("id", "head", "misc")}
"""The library's parsers of the fields that are more than strings here. All other fields stay strings."""

_NEW_DOCUMENT = re.compile(r"#\s*newdoc(\s|$)")
"""The comment before the first sentence of a document."""

_ENTITY = re.compile(r"(?P<opens>\()?(?P<name>[^()-]+)[^()]*(?P<closes>\))?")
"""The start of a mention of the entity e1, such as "(e1-person", or its end, "e1)", or both, "(e1-person)".

The name of the entity ends at the first dash. The facts from there to the bracket, such as "-person", are skipped.
"""


@dataclass
class _Sentence:
    """Hold a parsed sentence. Its words are numbered from 1, as by their ID.

    Attributes:
        first_line: The number of its first line in the file.
        document: The number of its document, from 1; 0 = no `# newdoc` comment comes before the sentence.
        rows: The row of each word: its fields by name, such as row["form"]. Word n has the row n - 1.
        multiword: The multiword tokens: {number of the first word: (number of the last word, row of the token)}.
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
        paragraphs: For each sentence, the number of its first line in the file, and its lines as one string.
        source: The file's name.
        unit: "sentence": each sentence is a text; "document": all sentences up to the next `# newdoc` are one text.
        on_bad_line: Called once for each malformed sentence.
    """
    sentences = _parse_sentences(paragraphs, on_bad_line)
    if unit == "sentence":
        for sentence in sentences:
            yield _join_sentences([sentence], source)
        return
    for _, document_sentences in groupby(sentences, key=attrgetter("document")):
        yield _join_sentences(list(document_sentences), source)


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


def _join_sentences(sentences: Sequence[_Sentence], source: str) -> AnnotatedText:
    """Return sentences as one annotated text, with a space between two sentences."""
    text = ""
    words: list[Span] = []
    links: list[Link] = []
    mentions: list[tuple[str, list[int]]] = []
    for sentence in sentences:
        n_words_before = len(words)
        text, spans = _append_sentence(text, sentence)
        words += spans
        text += " "
        links += _link_dependencies(sentence.rows, n_words_before)
        mentions += _find_mentions(sentence.rows, n_words_before)
    # Coreference is linked last, because an entity is mentioned in several sentences.
    links += _link_coreference(mentions)
    # Without `# newdoc` (0) the sentences of a file may be independent of each other: they share no document.
    document_number = sentences[0].document
    document = f"{source} {document_number}" if document_number else None
    line = sentences[0].first_line
    return AnnotatedText(text[:-1], tuple(words), tuple(links), source, line, document=document)


# Sentences


def _parse_sentence(lines: Sequence[str], first_line: int, document: int) -> _Sentence:
    """Return the sentence in these lines, the first of which has the number `first_line` in the file.

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
        # A row has no field for a column that its line lacks.
        if "misc" not in row:
            raise AnnotationError(f"{len(row)} columns, not 10: {shorten(line)}", number)
        # Parsed IDs: 3 for a word, (3, "-", 4) for a multiword token, (3, ".", 1) for an empty node.
        next_word = len(rows) + 1
        match row["id"]:
            case int(word) if word == next_word:
                rows.append(row)
            case (int(first), "-", int(last)) if first == next_word and first not in sentence.multiword:
                # Its words have rows of their own, below this one.
                sentence.multiword[first] = last, row
            case (int(), ".", int()):
                pass
            case _:
                raise AnnotationError(f"ID {line.split()[0]} is not where it belongs", number)
    # Refuse heads that the sentence does not have (0 is the root), and multiword tokens that end after the last word.
    for row in rows:
        head = row["head"]
        if head is not None and (not 0 <= head <= len(rows) or head == row["id"]):
            raise AnnotationError(f"HEAD {head} of word {row['id']} of {len(rows)}")
    for first, (last, _) in sentence.multiword.items():
        if last > len(rows):
            raise AnnotationError(f"{first}-{last} of a sentence of {len(rows)} words")
    # Find the mentions once here, so that unmatched brackets raise an error for this sentence alone.
    list(_find_mentions(rows, 0))
    return sentence


def _append_sentence(text: str, sentence: _Sentence) -> tuple[str, list[Span]]:
    """Return a text with a sentence's tokens appended, and the span of each of the sentence's words in it."""
    spans: list[Span] = []
    while len(spans) < len(sentence.rows):
        # The next token is a word, or a multiword token with all of its words.
        first_word = len(spans) + 1
        last_word = first_word
        token = sentence.rows[first_word - 1]
        if first_word in sentence.multiword:
            last_word, token = sentence.multiword[first_word]
        forms = [row["form"] for row in sentence.rows[first_word - 1 : last_word]]
        token_start = len(text)
        text += token["form"]
        # If the words' forms spell the token, each word has its own characters. If not, each has the whole token's.
        if "".join(forms) == token["form"]:
            spans += pairwise(accumulate(map(len, forms), initial=token_start))
        else:
            spans += [(token_start, len(text))] * len(forms)
        if (token["misc"] or {}).get("SpaceAfter") != "No":
            text += " "
    return text.rstrip(" "), spans


def _link_dependencies(rows: Sequence[Token], n_words_before: int) -> Iterator[Link]:
    """Link each word to its head, and each head to its dependents: one link to all dependents with the same label.

    Links number the words of the whole text from 0; `n_words_before` of these come before this sentence.
    """
    dependents: dict[tuple[int, str], list[int]] = {}
    for word, row in enumerate(rows, n_words_before):
        # A head is a word of the sentence, counted from 1; 0 = the root has no head.
        if row["head"]:
            head = n_words_before + row["head"] - 1
            yield Link(f"{row['deprel']}→parent", (word,), (head,))
            dependents.setdefault((head, row["deprel"]), []).append(word)
    for (head, label), words in dependents.items():
        yield Link(f"parent→{label}", (head,), tuple(words))


# Coreference


def _link_coreference(mentions: Iterable[tuple[str, list[int]]]) -> Iterator[Link]:
    """Link each mention, (entity, words), to all earlier mentions of its entity."""
    earlier_words_by_entity: dict[str, set[int]] = {}
    # In the order of the text: by the mentions' words.
    for entity, words in sorted(mentions, key=lambda mention: mention[1]):
        earlier_words = earlier_words_by_entity.setdefault(entity, set())
        targets = earlier_words.difference(words)
        if targets:
            yield Link(COREFERENCE, tuple(words), tuple(sorted(targets)))
        earlier_words.update(words)


def _find_mentions(rows: Sequence[Token], n_words_before: int) -> Iterator[tuple[str, list[int]]]:
    """Yield (entity, words) of each mention in the brackets of `Entity=`; discontinuous mentions are skipped.

    The words are the mention's syntactic head alone, or all of its words if no head is annotated. They are numbered in
    the whole text, as in `_link_dependencies`. In GUM, the entity's name comes before the first dash: "(e1-person-…".

    Raises:
        AnnotationError: The brackets do not match.
    """
    # The first word of each open mention, by the entity's name. An entity may have several open mentions, one inside
    # the other, in the order of their starts.
    open_words_by_name: dict[str, list[int]] = {}
    for word, row in enumerate(rows):
        entity = (row["misc"] or {}).get("Entity") or ""
        for match in _ENTITY.finditer(entity):
            name = match["name"]
            if match["opens"]:
                open_words_by_name.setdefault(name, []).append(word)
            if not match["closes"]:
                continue
            # A closing bracket ends the latest open mention of its entity.
            if not open_words_by_name.get(name):
                raise AnnotationError(
                    f"Entity={shorten(entity)} of word {word + 1} closes what is not open"
                )
            mention_rows = range(open_words_by_name[name].pop(), word + 1)
            # GUM writes a piece of a discontinuous mention as "e1[1/2]".
            if "[" in name:
                continue
            # The mention's syntactic head is its first word whose own head is outside the mention. The root's head is
            # 0, and so the row -1: it is outside too.
            words = [n_words_before + index for index in mention_rows]
            for index in mention_rows:
                head = rows[index]["head"]
                if head is not None and head - 1 not in mention_rows:
                    words = [n_words_before + index]
                    break
            yield name, words
    for name, open_words in open_words_by_name.items():
        if open_words:
            raise AnnotationError(f"Entity: {name} is never closed")
