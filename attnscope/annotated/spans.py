"""Parse texts with links between character spans, one JSON object per line.

    {"text": "The cat slept because it was tired.",
     "links": [{"from": [22, 24], "to": [4, 7], "label": "pronoun"}]}

A span is [first, last + 1] in characters (Unicode code points). "to" may be a list of spans: attending to any of them
is right. Entries with the same "from" and "label" are one link with all their targets. Without a "label" it is "link".
Words are those of `text.word_spans`, cut wherever a span begins or ends. "words", a list of spans, sets them instead;
"words": "characters" makes each character a word that is no space.

With a "target", links go from it to the text, as an encoder-decoder's cross-attention does: "from" are characters of
the target, and "to" of the text. "target_words" is for the target what "words" is for the text.

    {"text": "The cat slept.", "target": "Le chat dormait.",
     "links": [{"from": [3, 7], "to": [4, 7], "label": "aligned"}]}

"document", any string, says which texts belong together. Such texts are not independent: where texts are split into
two halves, to choose heads on one and score them on the other, they stay in the same half.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.corpus.formats import is_unicode, json_object, shorten
from attnscope.text import is_blank, word_spans


def parse(line: str, file: str, number: int) -> AnnotatedText | None:
    """Return the annotated text of a line of a file; None if its "text" is blank.

    Raises:
        AnnotationError: The line is no such object, or a span is empty, outside the text or overlaps its source.
    """
    # Read and check the fields. For a malformed line json_object returns the reason.
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
    to_spans = _parse_links(entry["links"], text, target)
    if is_blank(text):
        return None

    # Find the words of both texts, cut at the ends of all spans, so that each span holds whole words.
    all_from = [from_span for from_span, _ in to_spans]
    all_to = list(chain.from_iterable(to_spans.values()))
    target_words: list[Span] = []
    if target is None:
        words = _find_words(entry.get("words"), text, [*all_from, *all_to])
    else:
        words = _find_words(entry.get("words"), text, all_to)
        target_words = _find_words(entry.get("target_words"), target, all_from)
    # Replace the spans of each link by the words in them.
    links = []
    for (from_span, label), link_to_spans in to_spans.items():
        source = _words_in(from_span, target_words or words)
        targets: set[int] = set()
        for span in link_to_spans:
            targets.update(_words_in(span, words))
        links.append(Link(label, source, tuple(sorted(targets))))
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
    """Return the text in a field; None if the entry does not have it."""
    value = entry.get(name)
    return None if value is None else _require_text(value, f'"{name}"')


def _require_text(value: Any, name: str) -> str:
    """Return a value that must be a text, and not only blanks; `name` begins the message if it is not."""
    if not isinstance(value, str) or not value.strip() or not is_unicode(value):
        raise AnnotationError(f"{name} is no text: {shorten(repr(value))}")
    return value


def _parse_links(
    entries: Sequence[Any], text: str, target: str | None
) -> dict[tuple[Span, str], list[Span]]:
    """Return the links by ("from", "label"): the spans of "to" of all entries that have the same."""
    from_text = text if target is None else target
    to_spans: dict[tuple[Span, str], list[Span]] = {}
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise AnnotationError(f"link {number} is no object: {shorten(repr(entry))}")
        label = _require_text(entry.get("label", "link"), f"link {number}: its label")
        label = " ".join(label.split())
        from_span = _require_span(entry.get("from"), from_text, f'link {number}: "from"')
        from_start, from_stop = from_span
        # "to" is a list of spans, or one span.
        to = entry.get("to")
        if not isinstance(to, list) or not to or not all(isinstance(value, list) for value in to):
            to = [to]
        for value in to:
            start, stop = _require_span(value, text, f'link {number}: "to"')
            if target is None and start < from_stop and from_start < stop:
                raise AnnotationError(
                    f"link {number}: {[start, stop]} overlaps its source {list(from_span)}"
                )
            to_spans.setdefault((from_span, label), []).append((start, stop))
    return to_spans


def _require_span(value: Any, text: str, name: str) -> Span:
    """Return a span of a text, which must be in it and hold more than blanks; `name` begins the message if not."""
    # The types themselves, because True is an int too.
    if not isinstance(value, list) or list(map(type, value)) != [int, int]:
        raise AnnotationError(f"{name} is not [first, last + 1]: {shorten(repr(value))}")
    start, stop = value
    if not 0 <= start <= stop <= len(text):
        raise AnnotationError(f"{name} {value} is outside the text of {len(text)} characters")
    if is_blank(text[start:stop]):
        raise AnnotationError(f"{name} {value} is empty")
    return start, stop


def _find_words(value: Any, text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the words of a text, ordered by start: those that `value` sets ("words" of an entry), or its usual ones.

    The usual ones are cut wherever one of `spans` begins or ends.
    """
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
    words = sorted(_require_span(word, text, f"word {number}") for number, word in enumerate(value, 1))
    for word, next_word in pairwise(words):
        _, stop = word
        next_start, _ = next_word
        if next_start < stop:
            raise AnnotationError(f"words {list(word)} and {list(next_word)} overlap")
    return words


def _words_in(span: Span, words: Sequence[Span]) -> tuple[int, ...]:
    """Return the indices of the words in a span, which must hold some and cut none."""
    first, end = span
    indices = [index for index, (start, stop) in enumerate(words) if start < end and first < stop]
    if not indices:
        raise AnnotationError(f"the span {list(span)} holds no word")
    if words[indices[0]][0] < first or words[indices[-1]][1] > end:
        raise AnnotationError(f"the span {list(span)} cuts a word")
    return tuple(indices)
