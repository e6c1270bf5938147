"""CoNLL-U: dependencies as links in both directions, and coreference (`Entity=` in MISC, as GUM writes it).

Lines are parsed by the library conllu; what a treebank means by them is known here. Words are the syntactic words. The
words of a multiword token have the characters that their forms spell ("do" and "n't" in "don't"); where they spell
something else (French "du" is "de" and "le"), both have all of the token's. Empty nodes are not in the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from conllu.exceptions import ParseException
from conllu.models import Token
from conllu.parser import DEFAULT_FIELD_PARSERS, parse_line

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span, join_texts
from attnscope.corpus.formats import shorten

COREFERENCE = "coref→antecedent"
ELSEWHERE = "antecedent in another sentence"

Bad = Callable[[int, str], None]
"""Takes down a malformed line: its number and why. It may raise, where there are too many."""

_PARSERS = {name: DEFAULT_FIELD_PARSERS[name] for name in ("id", "head", "misc")}
_FIELDS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


@dataclass(frozen=True)
class _Mention:
    """A mention of an entity, and the words by which it is known: its syntactic head, or all where there is none."""

    entity: str
    words: tuple[int, ...]


@dataclass(frozen=True)
class _Sentence:
    text: AnnotatedText
    mentions: tuple[_Mention, ...]
    begins_document: bool


def texts(paragraphs: Iterable[tuple[int, str]], source: str, unit: str, bad: Bad) -> Iterator[AnnotatedText]:
    """The annotated texts of a file.

    `paragraphs` are its sentences, the lines of each joined by newlines, with the line that each begins on. With the
    unit "document", the sentences up to the next `# newdoc` are one text. Malformed sentences are skipped.
    """
    seen: set[str] = set()
    document: list[_Sentence] = []
    n_documents = 0
    for begin, block in paragraphs:
        try:
            sentence = _sentence(block.split("\n"), source, begin)
        except AnnotationError as error:
            bad(error.line or begin, error.reason)
            continue
        if sentence is None:
            continue
        if sentence.begins_document:
            seen, n_documents = set(), n_documents + 1
            if document:
                yield _join(document)
                document = []
        if unit == "document":
            document.append(sentence)
        else:
            links, n_elsewhere = _coreference(sentence.mentions, seen)
            left_out = {COREFERENCE: {ELSEWHERE: n_elsewhere}} if n_elsewhere else {}
            # Sentences of a file that tells of no document may be from anywhere.
            name = f"{source} {n_documents}" if n_documents else None
            text = sentence.text
            yield replace(text, links=(*text.links, *links), left_out=left_out, document=name)
        seen |= {mention.entity for mention in sentence.mentions}
    if document:
        yield _join(document)


def _join(sentences: list[_Sentence]) -> AnnotatedText:
    mentions: list[_Mention] = []
    first = 0
    for sentence in sentences:
        mentions += [_Mention(m.entity, tuple(w + first for w in m.words)) for m in sentence.mentions]
        first += len(sentence.text.words)
    return join_texts([sentence.text for sentence in sentences], _coreference(tuple(mentions), set())[0])


def _coreference(mentions: tuple[_Mention, ...], seen: set[str]) -> tuple[tuple[Link, ...], int]:
    """From each mention to all earlier ones of its entity; and how many have theirs in earlier sentences alone."""
    earlier: dict[str, set[int]] = {}
    links, elsewhere = [], 0
    for mention in sorted(mentions, key=lambda mention: mention.words):
        before = earlier.setdefault(mention.entity, set())
        targets = before.difference(mention.words)
        if targets:
            links.append(Link(COREFERENCE, mention.words, tuple(sorted(targets))))
        elif not before and mention.entity in seen:
            elsewhere += 1
        before.update(mention.words)
    return tuple(links), elsewhere


# Sentences ------------------------------------------------------------------------------------------------------


@dataclass
class _Rows:
    """The lines of a sentence, read."""

    words: list[Token] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    multiword: dict[int, tuple[int, str, bool]] = field(default_factory=dict)  # first word -> last, form, space after
    written: str = ""
    begins_document: bool = False


def _sentence(lines: list[str], source: str, begin: int) -> _Sentence | None:
    rows = _rows(lines, begin)
    if not rows.words:
        return None
    text, words = _write(rows)
    kinds = tuple("" if (upos := row.get("upos")) in (None, "_") else str(upos) for row in rows.words)
    return _Sentence(
        AnnotatedText(text, tuple(words), tuple(_dependencies(rows)), source, begin, kinds=kinds if any(kinds) else ()),
        tuple(_mentions(rows)),
        rows.begins_document,
    )


def _rows(lines: list[str], begin: int) -> _Rows:
    rows = _Rows()
    for number, line in enumerate(lines, begin):
        if line.startswith("#"):
            name, _, value = line[1:].partition("=")
            rows.begins_document |= name.split()[:1] == ["newdoc"]
            if name.strip() == "text":
                rows.written = value.strip()
            continue
        try:
            row = parse_line(line, _FIELDS, _PARSERS)
        except ParseException as error:
            raise AnnotationError(f"{error} {shorten(line)}", number) from None
        if "deprel" not in row:
            raise AnnotationError(f"{len(row)} columns, not 10: {shorten(line)}", number)
        match row["id"]:
            case int(place) if place == len(rows.words) + 1:
                rows.words.append(row)
                rows.lines.append(number)
            case (int(first), "-", int(last)) if first == len(rows.words) + 1 and first not in rows.multiword:
                rows.multiword[first] = last, row["form"], _space_after(row)
            case (int(), ".", int()):
                pass
            case _:
                raise AnnotationError(f"ID {line.split()[0]} is not where it belongs", number)
    for row, number in zip(rows.words, rows.lines, strict=True):
        if row["head"] is not None and not 0 <= row["head"] <= len(rows.words):
            raise AnnotationError(f"HEAD {row['head']} of a sentence of {len(rows.words)} words", number)
        if row["head"] == row["id"]:
            raise AnnotationError(f"HEAD {row['head']} is the word itself", number)
    for first, (last, _, _) in rows.multiword.items():
        if last > len(rows.words):
            raise AnnotationError(f"{first}-{last} of a sentence of {len(rows.words)} words", rows.lines[first - 1])
    return rows


def _space_after(row: Token) -> bool:
    return (row.get("misc") or {}).get("SpaceAfter") != "No"


def _write(rows: _Rows) -> tuple[str, list[Span]]:
    """The text, and where its words are: in the `# text` of the sentence if that has the forms, else as they say."""
    pieces: list[tuple[str, bool, list[str]]] = []  # form, space after, forms of the words in it
    place = 1
    while place <= len(rows.words):
        if place in rows.multiword:
            last, form, space = rows.multiword[place]
            pieces.append((form, space, [row["form"] for row in rows.words[place - 1 : last]]))
            place = last + 1
        else:
            row = rows.words[place - 1]
            pieces.append((row["form"], _space_after(row), [row["form"]]))
            place += 1
    starts, text = _locate([form for form, _, _ in pieces], rows.written), rows.written
    if starts is None:
        starts, text = [], ""
        for form, space, _ in pieces:
            starts.append(len(text))
            text += form + (" " if space else "")
        text = text.rstrip(" ")
    words: list[Span] = []
    for start, (form, _, forms) in zip(starts, pieces, strict=True):
        spelled = "".join(forms) == form
        at = start
        for word in forms:
            words.append((at, at + len(word)) if spelled else (start, start + len(form)))
            at += len(word)
    return text, words


def _locate(forms: list[str], text: str) -> list[int] | None:
    """Where forms stand in a text, one after the other with nothing but spaces between; None where they do not."""
    starts, at = [], 0
    for form in forms:
        while at < len(text) and text[at].isspace() and not text.startswith(form, at):
            at += 1
        if not text.startswith(form, at):
            return None
        starts.append(at)
        at += len(form)
    return None if text[at:].strip() else starts


def _dependencies(rows: _Rows) -> Iterator[Link]:
    """From each word to its head, and from each head to its dependents, of which any of a label is right."""
    dependents: dict[tuple[int, str], list[int]] = {}
    for row in rows.words:
        if not row["head"]:
            continue
        word, head, label = row["id"] - 1, row["head"] - 1, row["deprel"]
        yield Link(f"{label}→parent", (word,), (head,))
        dependents.setdefault((head, label), []).append(word)
    for (head, label), words in dependents.items():
        yield Link(f"parent→{label}", (head,), tuple(words))


# Coreference ----------------------------------------------------------------------------------------------------

_ENTITY = re.compile(r"\((?P<opened>[^()]+)(?P<whole>\))?|(?P<closed>[^()]+)\)")


def _mentions(rows: _Rows) -> Iterator[_Mention]:
    """The mentions that `Entity=` brackets; those that are cut in parts are left out."""
    standing: list[tuple[str, int]] = []
    for word, (row, number) in enumerate(zip(rows.words, rows.lines, strict=True)):
        entity = (row.get("misc") or {}).get("Entity")
        if not entity:
            continue
        if _ENTITY.sub("", entity):
            raise AnnotationError(f"Entity={shorten(entity)} does not open and close mentions", number)
        for match in _ENTITY.finditer(entity):
            name = (match["opened"] or match["closed"]).split("-")[0]
            if match["closed"]:
                last = next((i for i in reversed(range(len(standing))) if standing[i][0] == name), None)
                if last is None:
                    raise AnnotationError(f"Entity={shorten(entity)}: {name} is not open", number)
                _, start = standing.pop(last)
            elif match["whole"]:
                start = word
            else:
                standing.append((name, word))
                continue
            if "[" not in name:
                yield _Mention(name, _head_of(rows, start, word))
    if standing:
        raise AnnotationError(f"Entity: {standing[-1][0]} is never closed", rows.lines[standing[-1][1]])


def _head_of(rows: _Rows, start: int, last: int) -> tuple[int, ...]:
    """The word of a mention whose head is outside of it; all its words where no head is known."""
    inside = range(start, last + 1)
    for word in inside:
        head = rows.words[word]["head"]
        if head is not None and head - 1 not in inside:
            return (word,)
    return tuple(inside)
