"""Parse texts with links between character spans, from jsonl: one JSON object per line.

    {"text": "The cat slept because it was tired.",
     "links": [{"from": [22, 24], "to": [4, 7], "label": "pronoun"}]}

A span is [first, last + 1] in characters (Unicode code points). "to" may be a list of spans: attending to any of these
spans is right. Entries with the same "from" and "label" make one link to all their targets. The default label is
"link". `text.word_spans` finds the words, and words are cut wherever a span begins or ends. The field "words", a list
of spans, sets the words instead; with "words": "characters", each character that is no space is a word.

With a "target", links go from the target to the text, as in the cross-attention of an encoder-decoder: "from" is a span
of the target, and "to" a span of the text. "target_words" sets the words of the target, as "words" those of the text.

    {"text": "The cat slept.", "target": "Le chat dormait.",
     "links": [{"from": [3, 7], "to": [4, 7], "label": "aligned"}]}

Texts with the same "document", any string, are not independent of each other. When texts are split into two halves, to
choose heads on one half and score them on the other, these texts stay in the same half.
"""

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.corpus.formats import is_unicode, parse_json_object, shorten
from attnscope.text import is_blank, word_spans


def parse(line: str, source: str, line_number: int) -> AnnotatedText | None:
    """Return the annotated text in a line of the file `source`; None if its "text" is blank.

    Raises:
        AnnotationError: The line is no JSON object with these fields, or a span is empty, outside the text, or overlaps
            its link's source.
    """
    # Read and check the fields. For a malformed line parse_json_object returns the reason.
    entry = parse_json_object(line)
    if isinstance(entry, str):
        raise AnnotationError(entry)
    text = entry.get("text")
    if not isinstance(text, str) or not is_unicode(text):
        raise AnnotationError('no "text" that is a text')
    if not isinstance(entry.get("links"), list):
        raise AnnotationError('no "links" that is a list')
    target = _optional_text(entry, "target")
    document = _optional_text(entry, "document")
    to_spans_by_link = _parse_links(entry["links"], text, target)
    if is_blank(text):
        return None

    # Find the words of both texts, cut at the ends of all spans, so that each span holds whole words.
    from_spans = [from_span for from_span, _ in to_spans_by_link]
    to_spans = list(chain.from_iterable(to_spans_by_link.values()))
    # Without a target, both ends of a link are in the text, and there are no words of a target.
    target_words: list[Span] = []
    if target is None:
        words = _find_words(entry.get("words"), text, [*from_spans, *to_spans])
    else:
        words = _find_words(entry.get("words"), text, to_spans)
        target_words = _find_words(entry.get("target_words"), target, from_spans)
    # Replace the spans of each link by the indices of the words in them.
    links = []
    for (from_span, label), link_to_spans in to_spans_by_link.items():
        source_indices = _find_words_in(from_span, target_words or words)
        target_indices: set[int] = set()
        for span in link_to_spans:
            target_indices.update(_find_words_in(span, words))
        links.append(Link(label, source_indices, tuple(sorted(target_indices))))
    return AnnotatedText(
        text,
        tuple(words),
        tuple(links),
        source,
        line_number,
        document=f"{source} {document}" if document else None,
        target=target,
        target_words=tuple(target_words),
    )


def _optional_text(entry: dict[str, Any], name: str) -> str | None:
    """Return the text in a field; None if the entry does not have it."""
    value = entry.get(name)
    return None if value is None else _require_text(value, f'"{name}"')


def _require_text(value: Any, name: str) -> str:
    """Return a value; raise an AnnotationError if it is no text, or blank. The message calls the value `name`."""
    if not isinstance(value, str) or not value.strip() or not is_unicode(value):
        raise AnnotationError(f"{name} is no text: {shorten(repr(value))}")
    return value


def _parse_links(
    entries: Sequence[Any], text: str, target: str | None
) -> dict[tuple[Span, str], list[Span]]:
    """Merge entries with the same "from" and "label"; return {(from, label): all spans of their "to"}."""
    from_text = text if target is None else target
    to_spans_by_link: dict[tuple[Span, str], list[Span]] = {}
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise AnnotationError(f"link {number} is no object: {shorten(repr(entry))}")
        label = _require_text(entry.get("label", "link"), f"link {number}: its label")
        label = " ".join(label.split())
        from_span = _require_span(entry.get("from"), from_text, f'link {number}: "from"')
        from_start, from_stop = from_span
        # "to" is a list of spans, or one span. A span holds numbers, and no lists.
        to_values: Any = entry.get("to")
        # An empty list counts as one span, and is then refused.
        is_list = isinstance(to_values, list)
        if not is_list or to_values == [] or not all(isinstance(span, list) for span in to_values):
            to_values = [to_values]
        for value in to_values:
            start, stop = _require_span(value, text, f'link {number}: "to"')
            if target is None and start < from_stop and from_start < stop:
                raise AnnotationError(
                    f"link {number}: {[start, stop]} overlaps its source {list(from_span)}"
                )
            to_spans_by_link.setdefault((from_span, label), []).append((start, stop))
    return to_spans_by_link


def _require_span(value: Any, text: str, name: str) -> Span:
    """Return a value of JSON as a span; raise an AnnotationError if it is outside the text, or holds only blanks.

    The message calls the value `name`.
    """
    # Compare types, because isinstance(True, int) is true.
    if not isinstance(value, list) or list(map(type, value)) != [int, int]:
        raise AnnotationError(f"{name} is not [first, last + 1]: {shorten(repr(value))}")
    start, stop = value
    if not 0 <= start <= stop <= len(text):
        raise AnnotationError(f"{name} {value} is outside the text of {len(text)} characters")
    if is_blank(text[start:stop]):
        raise AnnotationError(f"{name} {value} is empty")
    return start, stop


def _find_words(words_field: Any, text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the words of a text, ordered by start.

    Args:
        words_field: The entry's field "words" or "target_words"; None = the entry has no such field.
        text: The text.
        spans: The spans of all links in the text. Without `words_field`, words are cut where a span begins or ends.
    """
    if words_field == "characters":
        return [(index, index + 1) for index, character in enumerate(text) if not character.isspace()]
    if words_field is None:
        boundaries = set(chain.from_iterable(spans))
        words: list[Span] = []
        for start, stop in word_spans(text):
            cuts = sorted(boundary for boundary in boundaries if start < boundary < stop)
            words += pairwise([start, *cuts, stop])
        return words
    if not isinstance(words_field, list):
        raise AnnotationError(
            f'"words" is neither "characters" nor a list of spans: {shorten(repr(words_field))}'
        )
    # Words that an entry sets may come in any order, but must not overlap.
    words = sorted(
        _require_span(word, text, f"word {number}") for number, word in enumerate(words_field, 1)
    )
    for word, next_word in pairwise(words):
        _, stop = word
        next_start, _ = next_word
        if next_start < stop:
            raise AnnotationError(f"words {list(word)} and {list(next_word)} overlap")
    return words


def _find_words_in(span: Span, words: Sequence[Span]) -> tuple[int, ...]:
    """Return the indices of the words in a span; raise an AnnotationError if it holds no word, or cuts one."""
    span_start, span_stop = span
    indices = [
        index
        for index, (word_start, word_stop) in enumerate(words)
        if word_start < span_stop and span_start < word_stop
    ]
    if not indices:
        raise AnnotationError(f"the span {list(span)} holds no word")
    first_word_start, _ = words[indices[0]]
    _, last_word_stop = words[indices[-1]]
    if first_word_start < span_start or last_word_stop > span_stop:
        raise AnnotationError(f"the span {list(span)} cuts a word")
    return tuple(indices)
