"""What one head does on one text, link by link, for people to look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed, PlacedLink
from attnscope.annotated.texts import Span
from attnscope.models.model import Model
from attnscope.records.relations.record import Example, ExampleLink, Relation
from attnscope.studies.relations.sums import batch_of_placed

MOST_WORDS = 24
"""Words of an example; of longer texts the part around a link is shown, and longer pairs are not."""

BETWEEN = "⇠"
"""Stands between the words of a target and those of the text that they look at."""


def example(model: Model, kind: str, relation: Relation, text: AnnotatedText, placed: Placed) -> Example | None:
    """What the best head of a relation does on a text; None where no link of it fits on a line."""
    import torch

    from attnscope.core.attention.probes import Weights
    from attnscope.core.attention.seam import Kind
    from attnscope.core.questions.relations import word_weights

    mine = [one for one in placed.links if one.link.relation == relation.name]
    shown = _shown(text, mine)
    mine = [one for one in mine if all(w in shown.looking for w in one.link.source)]
    mine = [one for one in mine if all(w in shown.looked_at for w in one.link.targets)]
    if not mine or relation.best is None:
        return None
    layer, head = relation.best
    kept = Weights([layer], [head], [cast(Kind, kind)])
    with torch.no_grad():
        model.run(batch_of_placed([placed], model.info.device), kept)
    (maps,) = kept.maps.values()
    weights, units = maps[layer][0], torch.from_numpy(placed.unit)
    links = []
    for one in mine:
        given = word_weights(weights, units, torch.tensor(one.tokens), torch.tensor(one.own, dtype=torch.int64))[0]
        unit = int(given.argmax())
        right = unit in one.targets and float(given[unit]) > 0
        links.append(
            ExampleLink(
                tuple(shown.looking[w] for w in one.link.source), tuple(shown.looked_at[w] for w in one.link.targets),
                shown.looked_at.get(int(placed.word[unit]), -1), right, float(given[unit]),
            )
        )  # fmt: skip
    return Example(
        relation.name, layer, head, text.source, text.line + shown.lines_before, shown.words, shown.spaced,
        tuple(links), shown.cut_before, shown.cut_after,
    )  # fmt: skip


@dataclass(frozen=True)
class _Shown:
    """The words of an example, and where in them the words are that look, and that are looked at."""

    words: tuple[str, ...]
    spaced: tuple[bool, ...]
    looking: dict[int, int]
    looked_at: dict[int, int]
    lines_before: int = 0
    cut_before: bool = False
    cut_after: bool = False


def _shown(text: AnnotatedText, links: list[PlacedLink]) -> _Shown:
    if text.target is None:
        first, stop = _window(text, links)
        places = {w: w - first for w in range(first, stop)}
        words, spaced = _spell(text.text, text.words[first:stop])
        before = text.text.count("\n", 0, text.words[first][0])
        return _Shown(words, spaced, places, places, before, first > 0, stop < len(text.words))
    n = len(text.target_words)
    if n + len(text.words) > 2 * MOST_WORDS:
        return _Shown((), (), {}, {})
    sides = _spell(text.target, text.target_words), _spell(text.text, text.words)
    (target, spaced), (words, more) = sides
    return _Shown(
        (*target, BETWEEN, *words), (*spaced, True, True, *more[1:]), {w: w for w in range(n)},
        {w: w + n + 1 for w in range(len(words))},
    )  # fmt: skip


def _spell(text: str, words: Sequence[Span]) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Words, and whether a space stands before each."""
    spaced = [False, *(one[1] < following[0] for one, following in pairwise(words))]
    return tuple(" ".join(text[start:stop].split()) for start, stop in words), tuple(spaced)


def _window(text: AnnotatedText, links: list[PlacedLink]) -> tuple[int, int]:
    """First and last + 1 of the words that are shown."""
    n = len(text.words)
    if n <= MOST_WORDS:
        return 0, n
    for one in links:
        ends = (*one.link.source, *one.link.targets)
        spread = max(ends) - min(ends) + 1
        if spread <= MOST_WORDS:
            first = min(max(0, min(ends) - (MOST_WORDS - spread) // 2), n - MOST_WORDS)
            return first, first + MOST_WORDS
    return 0, 0
