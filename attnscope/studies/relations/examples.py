"""What one head does on one text, link by link, for people to look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed, PlacedLink
from attnscope.annotated.texts import Span
from attnscope.models.model import Model
from attnscope.questions.relations import written_numbers
from attnscope.studies.relations.links import batch_of_placed

Place = tuple[int, int]
"""Layer and head."""

MOST_WORDS = 24
"""Words of an example; of longer texts the part around a link is shown, and longer pairs are not."""

BETWEEN = "⇠"
"""Stands between the words of a target and those of the text that they look at."""


def example_of(
    model: Model, kind: str, relation: str, best: Place, text: AnnotatedText, part: Placed
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Return what the best head of a relation does on a text: the row of the example, and those of its links.

    None where no link of it fits on a line. The rows lack the numbers of the relation and of the example.
    """
    import torch

    from attnscope.core.attention.probes import Weights
    from attnscope.core.attention.seam import Kind
    from attnscope.core.relations import word_weights

    # The links whose words are shown.
    links = [link for link in part.links if link.link.relation == relation]
    excerpt = _excerpt_of(text, links)
    links = [link for link in links if all(word in excerpt.looking for word in link.link.source)]
    links = [link for link in links if all(word in excerpt.looked_at for word in link.link.targets)]
    if not links:
        return None

    # Where the head looks.
    layer, head = best
    probe = Weights([layer], [head], [cast(Kind, kind)])
    with torch.no_grad():
        model.run(batch_of_placed([part], model.info.device), probe)
    (maps,) = probe.maps.values()
    units = torch.from_numpy(part.unit)
    rows = []
    for link in links:
        tokens, own = torch.tensor(link.tokens), torch.tensor(link.own, dtype=torch.int64)
        weights = word_weights(maps[layer][0], units, tokens, own)[0]
        unit = int(weights.argmax())
        rows.append(
            {
                "looking": written_numbers(excerpt.looking[word] for word in link.link.source),
                "targets": written_numbers(excerpt.looked_at[word] for word in link.link.targets),
                "looked": excerpt.looked_at.get(int(part.word[unit]), -1),
                "right": unit in link.targets and float(weights[unit]) > 0,
                "weight": float(weights[unit]),
            }
        )
    example = {
        "source": text.source,
        "line": text.line + excerpt.lines_before,
        "words": "\n".join(excerpt.words),
        "spaced": written_numbers(map(int, excerpt.spaced)),
        "cut_before": excerpt.cut_before,
        "cut_after": excerpt.cut_after,
    }
    return example, rows


@dataclass(frozen=True)
class _Excerpt:
    """The words of an example. `looking` and `looked_at` map words of the text to their numbers in the excerpt."""

    words: tuple[str, ...]
    spaced: tuple[bool, ...]
    looking: dict[int, int]
    looked_at: dict[int, int]
    lines_before: int = 0
    cut_before: bool = False
    cut_after: bool = False


def _excerpt_of(text: AnnotatedText, links: list[PlacedLink]) -> _Excerpt:
    if text.target is None:
        first, stop = _window(text, links)
        numbers = {word: word - first for word in range(first, stop)}
        words, spaced = _spell(text.text, text.words[first:stop])
        before = text.text.count("\n", 0, text.words[first][0])
        return _Excerpt(words, spaced, numbers, numbers, before, first > 0, stop < len(text.words))
    n = len(text.target_words)
    if n + len(text.words) > 2 * MOST_WORDS:
        return _Excerpt((), (), {}, {})
    target, target_spaced = _spell(text.target, text.target_words)
    words, spaced = _spell(text.text, text.words)
    return _Excerpt(
        (*target, BETWEEN, *words), (*target_spaced, True, True, *spaced[1:]), {word: word for word in range(n)},
        {word: word + n + 1 for word in range(len(words))},
    )  # fmt: skip


def _spell(text: str, words: Sequence[Span]) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Words, and whether a space stands before each."""
    spaced = [False, *(end < start for (_, end), (start, _) in pairwise(words))]
    return tuple(" ".join(text[start:stop].split()) for start, stop in words), tuple(spaced)


def _window(text: AnnotatedText, links: list[PlacedLink]) -> tuple[int, int]:
    """First and last + 1 of the words that are shown."""
    n = len(text.words)
    if n <= MOST_WORDS:
        return 0, n
    for link in links:
        ends = (*link.link.source, *link.link.targets)
        spread = max(ends) - min(ends) + 1
        if spread <= MOST_WORDS:
            first = min(max(0, min(ends) - (MOST_WORDS - spread) // 2), n - MOST_WORDS)
            return first, first + MOST_WORDS
    return 0, 0
