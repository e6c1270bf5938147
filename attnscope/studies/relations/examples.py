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


def example_of(model: Model, kind: str, relation: Relation, text: AnnotatedText, part: Placed) -> Example | None:
    """What the best head of a relation does on a text; None where no link of it fits on a line."""
    import torch

    from attnscope.core.attention.probes import Weights
    from attnscope.core.attention.seam import Kind
    from attnscope.core.questions.relations import word_weights

    links = [link for link in part.links if link.link.relation == relation.name]
    excerpt = _excerpt_of(text, links)
    links = [link for link in links if all(word in excerpt.looking for word in link.link.source)]
    links = [link for link in links if all(word in excerpt.looked_at for word in link.link.targets)]
    if not links or relation.best is None:
        return None
    layer, head = relation.best
    probe = Weights([layer], [head], [cast(Kind, kind)])
    with torch.no_grad():
        model.run(batch_of_placed([part], model.info.device), probe)
    (maps,) = probe.maps.values()
    weights, units = maps[layer][0], torch.from_numpy(part.unit)
    results = []
    for link in links:
        tokens, own = torch.tensor(link.tokens), torch.tensor(link.own, dtype=torch.int64)
        of_units = word_weights(weights, units, tokens, own)[0]
        unit = int(of_units.argmax())
        results.append(
            ExampleLink(
                tuple(excerpt.looking[word] for word in link.link.source),
                tuple(excerpt.looked_at[word] for word in link.link.targets),
                excerpt.looked_at.get(int(part.word[unit]), -1),
                unit in link.targets and float(of_units[unit]) > 0,
                float(of_units[unit]),
            )
        )
    return Example(
        relation.name, layer, head, text.source, text.line + excerpt.lines_before, excerpt.words, excerpt.spaced,
        tuple(results), excerpt.cut_before, excerpt.cut_after,
    )  # fmt: skip


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
