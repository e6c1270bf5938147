"""An atlas made up from a seed: measures and roles as `fake_findings` has them, and examples with their attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnscope.questions.atlas import KEPT_MASS, MAX_KEYS, N_OFFSETS, Atlas
from attnscope.questions.heads import Heads
from attnscope.results.table import Table, number
from attnscope.studies.atlas.rows import Example, WantedExample
from attnscope.studies.atlas.study import make_example_tables
from tests.findings_helpers import fake_findings

STORY = "the old cat did not cross wide street because it was too tired to walk any further that day"
WORDS = STORY.split()


def written(labels: Sequence[str]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Labels as the text that they could be of, and where each stands in it: capitals and commas that labels lack."""
    text = ""
    offsets = []
    for label in labels:
        if label not in ("[CLS]", "[SEP]"):
            text += (", " if len(offsets) % 7 == 5 else " ") if text else ""
            offsets.append((len(text), len(text) + len(label)))
            text += label.title() if len(offsets) % 4 == 2 else label
        else:
            offsets.append((len(text), len(text)))
    return text, tuple(offsets)


def made_example(chance: np.random.Generator, wanted: WantedExample, n_tokens: int) -> Example:
    """An example of random words with random attention."""
    labels = ("[CLS]", *map(str, chance.choice(WORDS, n_tokens - 2)), "[SEP]")
    weights = chance.dirichlet(np.full(n_tokens, 0.1), n_tokens)
    ends = [0]
    keys = []
    codes = []
    for row in weights:
        order = np.argsort(-row, kind="stable")[:MAX_KEYS]
        order = order[: int(np.searchsorted(np.cumsum(row[order]), KEPT_MASS)) + 1]
        keys.append(order)
        codes.append(np.rint(255 * row[order]))
        ends.append(ends[-1] + len(order))
    excerpt, offsets = written(labels)
    kept = np.concatenate(keys).astype(np.uint8), np.concatenate(codes).astype(np.uint8)
    places = np.arange(n_tokens)
    special = np.isin(labels, ["[CLS]", "[SEP]"])
    about = (
        int(chance.integers(999)),
        "made.txt:1",
        n_tokens,
        places,
        labels,
        special,
        3,
        excerpt,
        offsets,
    )
    return Example(wanted, *about, np.array(ends), *kept)


def token_rows(chance: np.random.Generator, head: int) -> list[dict[str, Any]]:
    """The token table of a head: the lower end of a lift is one less than it, the upper one more."""
    rows = []
    for side in ("asks", "gets", "pairs"):
        for at in range(1, 6):
            query, key = map(str, chance.choice(WORDS, 2))
            row = {
                "head": head,
                "side": side,
                "query": query,
                "key": key,
                "mass": 0.1 * at,
                "lift": 9.0 - at,
            }
            row |= {"asks": {"key": ""}, "gets": {"query": ""}, "pairs": {}}[side]
            rows.append({**row, "n_queries": 30, "n_texts": 9})
    return rows


def small_atlas(
    n_layers: int = 2,
    n_heads: int = 3,
    *,
    seed: int = 0,
    n_tokens: int = 20,
    n_top: int = 3,
    model: str = "minilm",
    findings: Heads | None = None,
) -> Atlas:
    """An atlas of `n_layers` x `n_heads` heads with `n_top` best examples and one of each decile a head."""
    chance = np.random.default_rng(seed)
    findings = findings or fake_findings(n_layers, n_heads, seed=seed, model=model)
    n = len(findings["heads"])
    wanted = [("top", rank) for rank in range(n_top)] + [("decile", rank) for rank in range(10)]
    examples = [
        made_example(chance, WantedExample(head, why, rank, float(chance.random())), n_tokens)
        for head in range(n)
        for why, rank in wanted
    ]
    rows = [row for head in range(n) for row in token_rows(chance, head)]
    tokens = Table.of(Atlas.TABLES["tokens"], rows)
    ends = {"lift_low": tokens["lift"] - 1, "lift_high": tokens["lift"] + 1}
    tables, grids = make_example_tables(examples)
    tables |= {name: findings[name] for name in ("heads", "roles")} | {
        "tokens": Table(tokens.columns, {**tokens.values, **ends})
    }
    for name in ("score_median", "score_p90", "map_x", "map_y"):
        tables["heads"] = tables["heads"].with_column(number(name), chance.normal(size=n))
    profiles = chance.dirichlet(np.ones(N_OFFSETS), n)
    apart = np.triu(chance.random((n, n)), 1)
    grids |= {
        "profile": profiles,
        "even_profile": np.full_like(profiles, 1 / N_OFFSETS),
        "deciles": np.sort(chance.random((n, 11))),
        "distance": apart + apart.T,
    }
    meanings = {"rank": "content_nats", "score": "a score that was made up", "lift": "an even share"}
    options = {**findings.options, **meanings}
    return Atlas(findings.run, {**findings.corpus, "n_sampled": 40}, options, tables, grids)


# An atlas as objects


@dataclass(frozen=True)
class Row:
    """A row of a token table."""

    side: str
    tokens: tuple[str, ...]
    mass: float
    lift: float
    low: float
    high: float
    count: int
    n_texts: int


@dataclass(frozen=True)
class Place:
    """A head by its kind, layer and number."""

    kind: str
    layer: int
    head: int
    name: str


def places_of(atlas: Atlas) -> list[Place]:
    """The heads of an atlas."""
    heads = atlas.table("heads")
    columns = (
        heads["kind"].tolist(),
        heads["layer"].tolist(),
        heads["head"].tolist(),
        heads.head_names(),
    )
    return [Place(*each) for each in zip(*columns, strict=True)]


def rows_of(atlas: Atlas, head: int) -> list[Row]:
    """The token table of a head."""
    tokens = atlas.table("tokens")
    rows = []
    for at in np.flatnonzero(tokens["head"] == head):
        labels = tuple(str(tokens[side][at]) for side in ("query", "key") if tokens[side][at])
        numbers = (tokens["mass"][at], *tokens.interval("lift")[at])
        counts = (int(tokens["n_queries"][at]), int(tokens["n_texts"][at]))
        rows.append(Row(str(tokens["side"][at]), labels, *map(float, numbers), *counts))
    return rows


def examples_of(atlas: Atlas) -> list[Example]:
    """The examples of an atlas, as its study read them."""
    examples = atlas.table("examples")
    read = []
    for at in range(len(examples)):
        shown = atlas.table("shown").select(atlas.tokens_of(at))
        names = ("head", "why", "rank", "score")
        wanted = WantedExample(*(examples[name][at].item() for name in names))
        first = int(shown["first_kept"][0]) if len(shown) else 0
        starts = np.concatenate([[0], np.cumsum(shown["n_kept"])])
        kept = slice(first, first + int(starts[-1]))
        offsets = tuple(zip(shown["start"].tolist(), shown["stop"].tolist(), strict=True))
        about = (
            int(examples["text"][at]),
            str(examples["source"][at]),
            int(examples["n_tokens"][at]),
            shown["place"],
        )
        about += (
            tuple(atlas.labels(at)),
            shown["special"],
            int(examples["focus"][at]),
            atlas.excerpt(at),
            offsets,
        )
        read.append(Example(wanted, *about, starts, atlas["kept_key"][kept], atlas["kept_code"][kept]))
    return read


def with_examples(atlas: Atlas, examples: Sequence[Example]) -> Atlas:
    """The atlas with other examples."""
    tables, grids = make_example_tables(examples)
    return replace(atlas, tables={**atlas.tables, **tables}, grids={**atlas.grids, **grids})


def weights_of(example: Example) -> np.ndarray:
    """The kept weights of an example, (query, key)."""
    n = len(example.positions)
    weights = np.zeros((n, n), np.float32)
    weights[np.repeat(np.arange(n), np.diff(example.starts)), example.keys] = example.codes / np.float32(
        255
    )
    return weights


def pieces_of(example: Example) -> list[tuple[str, str]]:
    """What stands before each token of an example, and its characters."""
    pieces = []
    end = 0
    for label, (start, stop) in zip(example.labels, example.offsets, strict=True):
        pieces.append((example.excerpt[end:start], example.excerpt[max(start, end) : stop] or label))
        end = max(end, stop)
    return pieces
