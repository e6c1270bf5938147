"""An atlas made up from a seed: measures and roles as `fake_findings` has them, and examples with their attention."""

from collections.abc import Sequence

import numpy as np

from attnscope.records.atlas.record import FURTHEST, KEPT_MASS, MOST_KEYS, Atlas, ExampleFacts, TokenRow
from tests.findings_helpers import fake_findings

WORDS = (
    "the", "old", "cat", "did", "not", "cross", "wide", "street", "because", "it", "was", "too", "tired", "to", "walk",
    "any", "further", "that", "day",
)  # fmt: skip


def written(labels: Sequence[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Labels as the text that they could be of, and where each stands in it: capitals and commas that labels lack."""
    text, offsets = "", []
    for label in labels:
        if label not in ("[CLS]", "[SEP]"):
            text += (", " if len(offsets) % 7 == 5 else " ") if text else ""
            offsets.append((len(text), len(text) + len(label)))
            text += label.title() if len(offsets) % 4 == 2 else label
        else:
            offsets.append((len(text), len(text)))
    return text, tuple(offsets)


def small_atlas(
    n_layers: int = 2,
    n_heads: int = 3,
    *,
    seed: int = 0,
    n_tokens: int = 20,
    n_top: int = 3,
    model: str = "minilm",
) -> Atlas:
    """An atlas of `n_layers` x `n_heads` heads with `n_top` best examples and one of each decile a head."""
    chance = np.random.default_rng(seed)
    findings = fake_findings(n_layers, n_heads, seed=seed, model=model)
    n = len(findings.heads)
    facts, places, special, ends, keys, codes = [], [], [], [0], [], []
    for number in range(n):
        wanted = [("top", rank) for rank in range(n_top)] + [("decile", rank) for rank in range(10)]
        for why, rank in wanted:
            labels = ("[CLS]", *chance.choice(WORDS, n_tokens - 2), "[SEP]")
            excerpt, offsets = written(labels)
            weights = chance.dirichlet(np.full(n_tokens, 0.1), n_tokens)
            score = float(chance.random())
            facts.append(
                ExampleFacts(
                    number,
                    why,
                    rank,
                    score,
                    int(chance.integers(999)),
                    "made.txt:1",
                    n_tokens,
                    labels,
                    3,
                    excerpt,
                    offsets,
                )
            )
            places.append(np.arange(n_tokens))
            special.append(np.isin(labels, ["[CLS]", "[SEP]"]))
            for row in weights:
                order = np.argsort(-row, kind="stable")[:MOST_KEYS]
                order = order[: int(np.searchsorted(np.cumsum(row[order]), KEPT_MASS)) + 1]
                keys.append(order)
                codes.append(np.rint(255 * row[order]))
                ends.append(ends[-1] + len(order))
    profiles = chance.dirichlet(np.ones(2 * FURTHEST + 3), n).astype(np.float32)
    apart = chance.random((n, n), dtype=np.float32)
    sides = {"asks": 1, "gets": 1, "pairs": 2}
    return Atlas(
        findings.run, {**findings.corpus, "n_sampled": 40}, {**findings.options, "rank": "a score that was made up"},
        "content_nats", findings.heads, tuple(facts),
        tuple(
            tuple(
                TokenRow(side, tuple(map(str, chance.choice(WORDS, n))), 0.1 * at, 9.0 - at, 8.0 - at, 10.0 - at, 30, 9)
                for side, n in sides.items()
                for at in range(1, 6)
            )
            for _ in range(n)
        ),
        profiles, np.full_like(profiles, 1 / profiles.shape[1]),
        np.sort(chance.random((n, 11), dtype=np.float32)),
        np.triu(apart, 1) + np.triu(apart, 1).T, chance.normal(size=(n, 2)).astype(np.float32),
        np.concatenate(places).astype(np.int32), np.concatenate(special), np.array(ends[1:], np.int64),
        np.concatenate(keys).astype(np.uint8), np.concatenate(codes).astype(np.uint8), findings.descriptions,
    )  # fmt: skip
