"""What one head does on one text, link by link, for people to look at."""

import numpy as np

from attnscope.annotated import AnnotatedText
from attnscope.annotated.alignment import Placed, PlacedLink
from attnscope.models.model import Batch, Model
from attnscope.records.relations import Example, ExampleLink, Relation

MOST_WORDS = 24
"""Words of an example; of longer texts the part around a link is shown."""


def example(model: Model, relation: Relation, text: AnnotatedText, placed: Placed) -> Example | None:
    """What the best head of a relation does on a text; None where no link of it fits on a line."""
    import torch

    from attnscope.core.probes import Weights
    from attnscope.core.relations import word_weights

    mine = [one for one in placed.links if one.link.relation == relation.name]
    first, stop = _window(text, mine)
    mine = [one for one in mine if all(first <= w < stop for w in (*one.link.source, *one.link.targets))]
    if not mine or relation.best is None:
        return None
    layer, head = relation.best
    tokens, device = placed.chunk.tokens, model.info.device
    kept = Weights([layer], [head])
    with torch.no_grad():
        ids, segments = (
            torch.from_numpy(part.astype(np.int64))[None].to(device) for part in (tokens.ids, tokens.segments)
        )
        model.run(Batch(ids, None, segments), kept)
    (maps,) = kept.maps.values()
    weights, units = maps[layer][0], torch.from_numpy(placed.unit)
    links = []
    for one in mine:
        given = word_weights(weights, units, torch.tensor(one.tokens), torch.tensor(one.own))[0]
        unit = int(given.argmax())
        looked = int(placed.word[unit])
        right = unit in one.targets and float(given[unit]) > 0
        shown = looked - first if first <= looked < stop else -1
        links.append(
            ExampleLink(
                tuple(w - first for w in one.link.source), tuple(w - first for w in one.link.targets),
                shown, right, float(given[unit]),
            )
        )  # fmt: skip
    words = range(first, stop)
    return Example(
        relation.name, layer, head, text.source, text.line + text.text.count("\n", 0, text.words[first][0]),
        tuple(" ".join(text.word(w).split()) for w in words),
        tuple(w > first and text.words[w - 1][1] < text.words[w][0] for w in words), tuple(links),
        first > 0, stop < len(text.words),
    )  # fmt: skip


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
