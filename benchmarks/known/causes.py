"""Whether ablate, weights and relations rank the heads that matter above the rest: areas under the curve.

- ablate: heads of a grown circuit, by the loss without each (`mean_loss`). The loss is of every next word, so that only
  tasks count that ask for every word: elsewhere most predictions were never trained.
- weights: the pair of heads that an induction circuit is made of, among all pairs, by composition through keys.
- relations: planted heads that look from a closing bracket at the one that it closes, by their accuracy on these links.
"""

from typing import Any

import numpy as np

from benchmarks.known.scores import roc_auc
from benchmarks.known.truth import KnownModel, Text

SOURCES = {
    "ablate": "heads whose mean-ablation costs the task, by a forward pass in NumPy (Michel et al. 2019); of tasks "
    "that ask for every next word",
    "weights": "the previous-token and the induction head (Elhage et al. 2021, K-composition)",
    "relations": "planted heads from a closing bracket to its partner (Clark et al. 2019, section 4)",
}


def score(known: KnownModel) -> dict[str, Any]:
    """The areas that this model has a truth for: name -> area, and how many heads or pairs matter, of how many."""
    made: dict[str, Any] = {}
    if known.circuit:
        if known.asks_all:
            made["ablate"] = _ablate(known)
        pairs = _induction_pairs(known)
        if pairs:
            made["weights"] = _weights(known, pairs)
    partners = [
        place
        for place, truth in known.heads.items()
        if any(rule.name == "partner" for rule in truth.rules)
    ]
    if partners:
        made["relations"] = _relations(known, partners)
    return made


def _area(values: np.ndarray, matters: np.ndarray) -> dict[str, Any]:
    area = roc_auc(values[matters], values[~matters])
    return {
        "auc": None if np.isnan(area) else round(area, 4),
        "n": int(matters.sum()),
        "of": matters.size,
    }


def _ablate(known: KnownModel) -> dict[str, Any]:
    import attnscope

    found = attnscope.ablate(
        known.model, [text.written for text in known.texts], attnscope.AblateOptions(("mean",))
    )
    heads = found.table("heads")
    places = zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True)
    return _area(heads["mean_loss"], np.array([place in known.circuit for place in places]))


def _induction_pairs(known: KnownModel) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    named = {place: {rule.words for rule in truth.rules} for place, truth in known.heads.items()}
    return [
        (before, behind)
        for before in named
        for behind in named
        if "the previous token" in named[before]
        and "what followed the same token before" in named[behind]
        and before[0] < behind[0]
    ]


def _weights(known: KnownModel, pairs: list[tuple[tuple[int, int], tuple[int, int]]]) -> dict[str, Any]:
    import attnscope

    found = attnscope.weights(known.model)
    heads = found.table("heads")
    places = list(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))
    links = found.strongest("K", len(places) ** 2)
    values = np.array([found.excess[1][link] for link in links])
    matters = np.array([(places[sender], places[receiver]) in pairs for sender, receiver in links])
    return _area(values, matters)


def _relations(known: KnownModel, partners: list[tuple[int, int]]) -> dict[str, Any]:
    import attnscope

    texts = [annotate(known, text) for text in known.texts]
    found = attnscope.relations(known.model, [text for text in texts if text.links])
    relation = found["bracket→partner"]
    values = np.nan_to_num(relation.accuracy)
    matters = np.zeros(values.shape, np.bool_)
    for place in partners:
        matters[place] = True
    return _area(values.ravel(), matters.ravel())


def annotate(known: KnownModel, text: Text) -> Any:
    """Return a text with a link from each closing bracket to the one that it closes."""
    from attnscope.annotated import AnnotatedText, Link

    # The texts' own brackets: the same for every head.
    rule = next(rule for truth in known.heads.values() for rule in truth.rules if rule.name == "partner")
    keys = rule.keys(text)
    words, start = [], 0
    for token in text.tokens[1 : text.n - text.n_last]:
        words.append((start, start + len(token)))
        start += len(token) + 1
    links = tuple(
        Link("bracket→partner", (query - 1,), (int(np.flatnonzero(keys[query])[0]) - 1,))
        for query in np.flatnonzero(keys.any(1)).tolist()
    )
    return AnnotatedText(text.written, tuple(words), links, "planted", 1)
