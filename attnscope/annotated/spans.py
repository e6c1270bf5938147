"""Texts with links between character spans, a JSON object a line.

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
from typing import Any

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.corpus.formats import is_unicode, json_object, shorten
from attnscope.text import is_blank, word_spans


def parse(line: str, source: str, number: int) -> AnnotatedText | None:
    """The annotated text of a line; None where its text is blank.

    Raises:
        AnnotationError: It is no such object, or a span is outside the text, empty, or where it cannot be.
    """
    entry = json_object(line)
    if isinstance(entry, str):
        raise AnnotationError(entry, number)
    try:
        return _text(entry, source, number)
    except AnnotationError as error:
        error.line = number
        raise


def _text(entry: dict[str, Any], source: str, number: int) -> AnnotatedText | None:
    text, entries = entry.get("text"), entry.get("links")
    if not isinstance(text, str) or not is_unicode(text):
        raise AnnotationError('no "text" that is a text')
    if not isinstance(entries, list):
        raise AnnotationError('no "links" that is a list')
    target, document = entry.get("target"), entry.get("document")
    for name, value in (("target", target), ("document", document)):
        if value is not None and not (isinstance(value, str) and is_unicode(value) and value.strip()):
            raise AnnotationError(f'"{name}" is no text: {shorten(repr(value))}')
    looking = text if target is None else target
    wanted: dict[tuple[Span, str], list[Span]] = {}
    for place, link in enumerate(entries, 1):
        if not isinstance(link, dict):
            raise AnnotationError(f"link {place} is no object: {shorten(repr(link))}")
        label = link.get("label", "link")
        if not isinstance(label, str) or not label.strip() or not is_unicode(label):
            raise AnnotationError(f"link {place}: its label is no text: {shorten(repr(label))}")
        label = " ".join(label.split())
        origin = _span(link.get("from"), looking, f'link {place}: "from"')
        goals = _targets(link.get("to"), text, f'link {place}: "to"')
        for goal in goals:
            if target is None and goal[0] < origin[1] and origin[0] < goal[1]:
                raise AnnotationError(f"link {place}: {list(goal)} overlaps its source {list(origin)}")
        wanted.setdefault((origin, label), []).extend(goals)
    if is_blank(text):
        return None
    goal_spans = [goal for goals in wanted.values() for goal in goals]
    origins = [origin for origin, _ in wanted]
    words = _words_of(entry.get("words"), text, goal_spans if target is not None else [*origins, *goal_spans])
    target_words = [] if target is None else _words_of(entry.get("target_words"), target, origins)
    links = tuple(
        Link(
            label,
            _covered(words if target is None else target_words, origin),
            tuple(sorted({w for goal in goals for w in _covered(words, goal)})),
        )
        for (origin, label), goals in wanted.items()
    )
    return AnnotatedText(
        text, tuple(words), links, source, number,
        document=document and f"{source} {document}", target=target, target_words=tuple(target_words),
    )  # fmt: skip


def _targets(given: Any, text: str, name: str) -> list[Span]:
    """One span or a list of them."""
    if isinstance(given, list) and given and all(isinstance(one, list) for one in given):
        return [_span(one, text, name) for one in given]
    return [_span(given, text, name)]


def _span(given: Any, text: str, name: str) -> Span:
    whole = isinstance(given, list) and len(given) == 2 and all(type(end) is int for end in given)
    if not whole:
        raise AnnotationError(f"{name} is not [first, last + 1]: {shorten(repr(given))}")
    start, stop = given
    if not 0 <= start <= stop <= len(text):
        raise AnnotationError(f"{name} {given} is outside the text of {len(text)} characters")
    if start == stop or text[start:stop].isspace():
        raise AnnotationError(f"{name} {given} is empty")
    return start, stop


def _words_of(given: Any, text: str, spans: Sequence[Span]) -> list[Span]:
    """The words that are given, or those of a text, cut wherever a span begins or ends."""
    if given == "characters":
        return [(place, place + 1) for place, letter in enumerate(text) if not letter.isspace()]
    if given is not None:
        return _given_words(given, text)
    ends = {end for span in spans for end in span}
    words = []
    for start, stop in word_spans(text):
        cuts = [start, *sorted(end for end in ends if start < end < stop), stop]
        words += list(zip(cuts[:-1], cuts[1:], strict=True))
    return words


def _given_words(given: Any, text: str) -> list[Span]:
    if not isinstance(given, list):
        raise AnnotationError(f'"words" is neither "characters" nor a list of spans: {shorten(repr(given))}')
    words = sorted(_span(one, text, f"word {place}") for place, one in enumerate(given, 1))
    for one, following in zip(words, words[1:], strict=False):
        if following[0] < one[1]:
            raise AnnotationError(f"words {list(one)} and {list(following)} overlap")
    return words


def _covered(words: Sequence[Span], span: Span) -> tuple[int, ...]:
    """The words of a span; an AnnotationError if there are none, or the span cuts one."""
    inside = [number for number, (start, stop) in enumerate(words) if start < span[1] and span[0] < stop]
    if not inside or any(not span[0] <= words[n][0] < words[n][1] <= span[1] for n in inside):
        raise AnnotationError(f"the span {list(span)} {'cuts a word' if inside else 'holds no word'}")
    return tuple(inside)
