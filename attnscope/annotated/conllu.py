"""Read CoNLL-U: dependencies as links in both directions, and coreference (`Entity=` in MISC, as GUM writes it).

Lines are parsed by the library conllu; what a treebank means by them is known here. Words are the syntactic words. The
words of a multiword token have the characters that their forms spell ("do" and "n't" in "don't"); where they spell
something else (French "du" is "de" and "le"), both have all of the token's. Empty nodes are not in the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from conllu.exceptions import ParseException
from conllu.models import Token
from conllu.parser import DEFAULT_FIELD_PARSERS, parse_line

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.corpus.formats import shorten

COREFERENCE = "coref→antecedent"

Bad = Callable[[int, str], None]
"""Takes down a malformed line: its number and why. It may raise, where there are too many."""

_PARSERS = {name: DEFAULT_FIELD_PARSERS[name] for name in ("id", "head", "misc")}
_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")
_ENTITY = re.compile(r"\((?P<opened>[^()]+)(?P<whole>\))?|(?P<closed>[^()]+)\)")


@dataclass
class _Sentence:
    """Hold a parsed sentence.

    Attributes:
        begin: The line that it begins on.
        rows: Its words; `lines`: the line of each.
        multiword: First word -> last word and row of a multiword token.
        document: The number of its document; 0 = the file names no documents.
        mentions: The entity that each mention is of, and the words by which it is known.
    """

    begin: int
    rows: list[Token] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    multiword: dict[int, tuple[int, Token]] = field(default_factory=dict)
    document: int = 0
    mentions: list[tuple[str, list[int]]] = field(default_factory=list)


def texts(paragraphs: Iterable[tuple[int, str]], source: str, unit: str, bad: Bad) -> Iterator[AnnotatedText]:
    """Return the annotated texts of a file.

    `paragraphs` are its sentences, the lines of each joined by newlines, with the line that each begins on. With the
    unit "document", the sentences up to the next `# newdoc` are one text. Malformed sentences are skipped.
    """
    document: list[_Sentence] = []
    n_documents = 0
    for begin, block in paragraphs:
        # Parse the sentence; skip a malformed one.
        lines = block.split("\n")
        try:
            sentence = _read(lines, begin)
        except AnnotationError as error:
            bad(error.line or begin, error.reason)
            continue
        if not sentence.rows:
            continue
        # A `# newdoc` line ends the document before it.
        if any(line.startswith("#") and line[1:].split()[:1] == ["newdoc"] for line in lines):
            n_documents += 1
            if document:
                yield _text_of(document, source)
            document = []
        sentence.document = n_documents
        document.append(sentence)
        if unit == "sentence":
            yield _text_of(document, source)
            document = []
    if document:
        yield _text_of(document, source)


def _text_of(sentences: Sequence[_Sentence], source: str) -> AnnotatedText:
    """Return sentences as one text, with a space between two."""
    text = ""
    words: list[Span] = []
    kinds: list[str] = []
    links: list[Link] = []
    mentions: list[tuple[str, list[int]]] = []
    for sentence in sentences:
        # Word numbers and spans of a sentence move by the words and characters before it.
        first = len(words)
        written, spans = _write(sentence)
        words += [(start + len(text), stop + len(text)) for start, stop in spans]
        text += f"{written} "
        kinds += [row["upos"] if row["upos"] != "_" else "" for row in sentence.rows]
        links += _dependencies(sentence.rows, first)
        mentions += [(entity, [first + word for word in known_by]) for entity, known_by in sentence.mentions]
    links += _coreference(mentions)
    # Sentences of a file that tells of no document may be from anywhere.
    number = sentences[0].document
    return AnnotatedText(
        text[:-1],
        tuple(words),
        tuple(links),
        source,
        sentences[0].begin,
        document=f"{source} {number}" if number else None,
        kinds=tuple(kinds) if any(kinds) else (),
    )


# Sentences


def _read(lines: Sequence[str], begin: int) -> _Sentence:
    """Return the sentence of some lines.

    Raises:
        AnnotationError: A line is malformed.
    """
    sentence = _Sentence(begin)
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
        match row["id"]:
            case int(word) if word == len(rows) + 1:
                rows.append(row)
                sentence.lines.append(number)
            case (int(first), "-", int(last)) if first == len(rows) + 1 and first not in sentence.multiword:
                sentence.multiword[first] = last, row
            case (int(), ".", int()):
                pass
            case _:
                raise AnnotationError(f"ID {line.split()[0]} is not where it belongs", number)

    # Each word's head, and the last word of multiword tokens, must be there.
    for row, number in zip(rows, sentence.lines, strict=True):
        head = row["head"]
        if head is not None and (not 0 <= head <= len(rows) or head == row["id"]):
            raise AnnotationError(f"HEAD {head} of word {row['id']} of {len(rows)}", number)
    for first, (last, _) in sentence.multiword.items():
        if last > len(rows):
            raise AnnotationError(f"{first}-{last} of a sentence of {len(rows)} words", sentence.lines[first - 1])
    sentence.mentions = list(_mentions(sentence))
    return sentence


def _write(sentence: _Sentence) -> tuple[str, list[Span]]:
    """Return the text that the forms spell, and where its words are."""
    text = ""
    words: list[Span] = []
    while len(words) < len(sentence.rows):
        # Take the next word, or all words of the next multiword token.
        n_before = len(words)
        last, token = sentence.multiword.get(n_before + 1, (n_before + 1, sentence.rows[n_before]))
        forms = [row["form"] for row in sentence.rows[n_before:last]]
        start = len(text)
        text += token["form"]
        # Forms that spell the token get a part of it each; others share all of it.
        for form in forms:
            if "".join(forms) == token["form"]:
                words.append((start, start + len(form)))
                start += len(form)
            else:
                words.append((start, len(text)))
        if _misc(token).get("SpaceAfter") != "No":
            text += " "
    return text.rstrip(" "), words


def _misc(row: Token) -> Mapping[str, str]:
    """Return the MISC column of a row; an empty mapping where it is `_`."""
    return row["misc"] or {}


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


def _mentions(sentence: _Sentence) -> Iterator[tuple[str, list[int]]]:
    """Return the mentions that `Entity=` brackets; those that are cut in parts are left out."""
    opened: list[tuple[str, int]] = []
    for word, (row, number) in enumerate(zip(sentence.rows, sentence.lines, strict=True)):
        entity = _misc(row).get("Entity") or ""
        wrong = AnnotationError(f"Entity={shorten(entity)} does not open and close mentions", number)
        if _ENTITY.sub("", entity):
            raise wrong
        for match in _ENTITY.finditer(entity):
            # GUM writes (name-type-…: the entity's name stands before the first dash.
            name = (match["opened"] or match["closed"]).split("-")[0]
            if match["opened"]:
                opened.append((name, word))
            if match["opened"] and not match["whole"]:
                continue
            # A closing bracket ends the latest open mention of its entity.
            mine = [place for place, (known, _) in enumerate(opened) if known == name]
            if not mine:
                raise wrong
            _, start = opened.pop(mine[-1])
            # "[" marks one part of a discontinuous mention.
            if "[" not in name:
                yield name, _known_by(sentence.rows, range(start, word + 1))
    if opened:
        name, word = opened[-1]
        raise AnnotationError(f"Entity: {name} is never closed", sentence.lines[word])


def _known_by(rows: Sequence[Token], words: range) -> list[int]:
    """Return the word of a mention whose head is outside of it; all its words where no head is known."""
    for word in words:
        head = rows[word]["head"]
        if head is not None and head - 1 not in words:
            return [word]
    return list(words)
