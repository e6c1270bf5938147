"""Parse texts with links between character spans, one JSON object per line.

    {"text": "The cat slept because it was tired.",
     "links": [{"from": [22, 24], "to": [4, 7], "label": "pronoun"}]}

A span is [first, last + 1] in characters (Unicode code points). "to" may be a list of spans, of which any is right;
entries with the same "from" and "label" are one link with all their targets. "label" may be missing: "link". Words are
those of `text.word_spans`, cut wherever a span begins or ends; "words", a list of spans, sets them instead, and
"words": "characters" makes each character one that is no space.

With a "target", links go from it to the text, as an encoder-decoder's cross-attention does: "from" are characters of
the target, and "to" of the text; "target_words" sets its words.

    {"text": "The cat slept.", "target": "Le chat dormait.",
     "links": [{"from": [3, 7], "to": [4, 7], "label": "aligned"}]}

"document", any string, says which texts belong together: they are in the same half of the evidence.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.corpus.formats import is_unicode, json_object, shorten
from attnscope.text import is_blank, word_spans


def parse(line: str, file: str, number: int) -> AnnotatedText | None:
    """Return the annotated text of a line of a file; None where it is blank.

    Raises:
        AnnotationError: The line is no such object, or a span is empty, outside the text or overlaps its source.
    """
    # Read and check the fields.
    entry = json_object(line)
    if isinstance(entry, str):
        raise AnnotationError(entry)
    text = entry.get("text")
    if not isinstance(text, str) or not is_unicode(text):
        raise AnnotationError('no "text" that is a text')
    if not isinstance(entry.get("links"), list):
        raise AnnotationError('no "links" that is a list')
    target = _optional_text(entry, "target")
    document = _optional_text(entry, "document")
    goals_by_link = _read_links(entry["links"], text, target)
    if is_blank(text):
        return None

    # Find the words of both texts, cut at the ends of all spans, so that each span holds whole words.
    goals = list(chain.from_iterable(goals_by_link.values()))
    origins = [origin for origin, _ in goals_by_link]
    target_words: list[Span] = []
    if target is None:
        words = _words_of(entry.get("words"), text, [*origins, *goals])
    else:
        words = _words_of(entry.get("words"), text, goals)
        target_words = _words_of(entry.get("target_words"), target, origins)
    # Turn the spans of each link into word numbers.
    links = []
    for (origin, label), link_goals in goals_by_link.items():
        source = _covered(target_words or words, origin)
        looked_at: set[int] = set()
        for goal in link_goals:
            looked_at.update(_covered(words, goal))
        links.append(Link(label, source, tuple(sorted(looked_at))))
    return AnnotatedText(
        text,
        tuple(words),
        tuple(links),
        file,
        number,
        document=f"{file} {document}" if document else None,
        target=target,
        target_words=tuple(target_words),
    )


def _optional_text(entry: dict[str, Any], name: str) -> str | None:
    """Return the text in a field that may be missing."""
    value = entry.get(name)
    return None if value is None else _text_of(value, f'"{name}"')


def _text_of(value: Any, name: str) -> str:
    """Return a value that must be a text with letters in it."""
    if not isinstance(value, str) or not value.strip() or not is_unicode(value):
        raise AnnotationError(f"{name} is no text: {shorten(repr(value))}")
    return value


def _read_links(
    entries: Sequence[Any], text: str, target: str | None
) -> dict[tuple[Span, str], list[Span]]:
    """Return the spans of "to" of all links with the same span of "from" and the same label, by that span and label."""
    source_text = text if target is None else target
    goals_by_link: dict[tuple[Span, str], list[Span]] = {}
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise AnnotationError(f"link {number} is no object: {shorten(repr(entry))}")
        label = _text_of(entry.get("label", "link"), f"link {number}: its label")
        label = " ".join(label.split())
        origin = _span(entry.get("from"), source_text, f'link {number}: "from"')
        origin_start, origin_stop = origin
        for goal in _as_list(entry.get("to")):
            start, stop = _span(goal, text, f'link {number}: "to"')
            if target is None and start < origin_stop and origin_start < stop:
                raise AnnotationError(
                    f"link {number}: {[start, stop]} overlaps its source {list(origin)}"
                )
            goals_by_link.setdefault((origin, label), []).append((start, stop))
    return goals_by_link


def _as_list(value: Any) -> list[Any]:
    """Return the spans of "to", which is a list of spans or one span."""
    if isinstance(value, list) and value and all(isinstance(goal, list) for goal in value):
        return value
    return [value]


def _span(value: Any, text: str, name: str) -> Span:
    """Return a span of a text that must hold something."""
    if not isinstance(value, list) or list(map(type, value)) != [int, int]:
        raise AnnotationError(f"{name} is not [first, last + 1]: {shorten(repr(value))}")
    start, stop = value
    if not 0 <= start <= stop <= len(text):
        raise AnnotationError(f"{name} {value} is outside the text of {len(text)} characters")
    if is_blank(text[start:stop]):
        raise AnnotationError(f"{name} {value} is empty")
    return start, stop


def _words_of(value: Any, text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the words that an entry sets, or those of a text, cut wherever a span begins or ends."""
    if value == "characters":
        return [(index, index + 1) for index, character in enumerate(text) if not character.isspace()]
    if value is None:
        ends = set(chain.from_iterable(spans))
        words: list[Span] = []
        for start, stop in word_spans(text):
            cuts = sorted(end for end in ends if start < end < stop)
            words += pairwise([start, *cuts, stop])
        return words
    if not isinstance(value, list):
        raise AnnotationError(
            f'"words" is neither "characters" nor a list of spans: {shorten(repr(value))}'
        )
    # Words that an entry sets may come in any order, but share no characters.
    words = sorted(_span(word, text, f"word {number}") for number, word in enumerate(value, 1))
    for word, next_word in pairwise(words):
        _, stop = word
        next_start, _ = next_word
        if next_start < stop:
            raise AnnotationError(f"words {list(word)} and {list(next_word)} overlap")
    return words


def _covered(words: Sequence[Span], span: Span) -> tuple[int, ...]:
    """Return the words of a span, which must hold some and cut none."""
    first, last = span
    inside = [number for number, (start, stop) in enumerate(words) if start < last and first < stop]
    if not inside:
        raise AnnotationError(f"the span {list(span)} holds no word")
    if words[inside[0]][0] < first or words[inside[-1]][1] > last:
        raise AnnotationError(f"the span {list(span)} cuts a word")
    return tuple(inside)
