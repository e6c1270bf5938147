"""Records that no model made, for tests of what is drawn and saved."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from attnscope.drawing.maps import MapsPage
from attnscope.drawing.style import Style
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.heatmap_figures import make_figures
from attnscope.questions.heatmap_plates import draw_figures
from attnscope.questions.maps import MapPart
from attnscope.questions.places import Picture
from attnscope.results.result import Result
from attnscope.results.result import load_record as load
from attnscope.results.tokens import Tokens

RUN = {
    "model": "toy",
    "sha256": "ab" * 32,
    "versions": {"attnscope": "0"},
    "dtype": "float32",
    "engine": "native",
    "notes": [],
}


def tokens_of(labels: Sequence[str], special: Sequence[int] = (), **more: Any) -> Tokens:
    """Tokens whose text is their labels, each a word; those at the places `special` stand for no text."""
    n = len(labels)
    ends = np.cumsum([len(label) + 1 for label in labels]) - 1
    offsets = np.stack([ends - [len(label) for label in labels], ends], 1).astype(np.int32)
    words = np.arange(n, dtype=np.int32)
    added = np.isin(np.arange(n), special)
    offsets[added] = words[added] = -1
    fields: dict[str, Any] = {
        "text": " ".join(labels),
        "ids": np.arange(n, dtype=np.int64),
        "labels": tuple(labels),
        "offsets": offsets,
        "special": added,
        "words": words,
        "segments": np.zeros(n, np.int32),
    }
    return Tokens(**(fields | more))


def require_lossless(record: Result, folder: Path) -> None:
    """It comes back as it was from its npz, and saved again it is the same bytes."""
    path = record.save(folder / "kept.npz")
    again = load(path)
    assert type(again) is type(record)
    np.testing.assert_equal(again.describe(), record.describe())
    assert [*again.arrays()] == [*record.arrays()]
    for name, array in record.arrays().items():
        np.testing.assert_array_equal(again.arrays()[name], array, strict=True, err_msg=name)
    assert again.save(folder / "again.npz").read_bytes() == path.read_bytes()


def require_read(kind: type[Result], described: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """What describes a record and its arrays are whole, as reading its file checks them."""
    kind.rebuild(described, held).require_whole()


def require_close(
    found: Result, expected: Result, of: str = "", *, rtol: float = 1e-4, atol: float = 1e-6
) -> None:
    """They hold the same numbers but for rounding, in arrays and elsewhere; notes and what made them may differ."""
    ours = dict(_leaves({"": found.describe(), **found.arrays()}))
    theirs = dict(_leaves({"": expected.describe(), **expected.arrays()}))
    assert list(ours) == list(theirs), of
    for name, value in theirs.items():
        if np.issubdtype(np.asarray(value).dtype, np.floating):
            np.testing.assert_allclose(ours[name], value, rtol=rtol, atol=atol, err_msg=f"{of}: {name}")
        else:
            np.testing.assert_array_equal(ours[name], value, err_msg=f"{of}: {name}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("run", "elapsed_s"):
                yield from _leaves(inner, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{number}]")
    else:
        yield path, value


def shares(*shape: int, seed: int = 0) -> np.ndarray:
    """Random weights whose rows sum to 1, float32."""
    drawn = np.random.default_rng(seed).exponential(size=shape) ** 2
    return (drawn / drawn.sum(-1, keepdims=True)).astype(np.float32)


def map_of(
    queries: Tokens,
    keys: Tokens | None = None,
    *,
    kind: str = "encoder",
    layers: int = 2,
    heads: int = 3,
    n_kv_heads: int | None = None,
    seed: int = 0,
) -> AttentionMap:
    keys = keys or queries
    return AttentionMap(
        kind=kind,
        layers=tuple(range(layers)),
        heads=tuple(range(heads)),
        weights=shares(layers, heads, len(queries), len(keys), seed=seed),
        queries=queries,
        keys=keys,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=n_kv_heads or heads,
    )


def record_of(*maps: AttentionMap, **fields: Any) -> Heatmap:
    return Heatmap(**({"text": maps[0].keys.text, "maps": maps, "run": RUN} | fields))


def simple(n: int = 4, *, layers: int = 2, heads: int = 3, seed: int = 0, **fields: Any) -> Heatmap:
    """A record of n tokens, of which the first and last are special if there are more than two."""
    labels = [f"t{i}" for i in range(n)]
    tokens = tokens_of(["[CLS]", *labels[1:-1], "[SEP]"], (0, n - 1)) if n > 2 else tokens_of(labels)
    return record_of(map_of(tokens, layers=layers, heads=heads, seed=seed), **fields)


def page_of(record: Any, stem: str, query: str | None = None, **style: Any) -> MapsPage:
    """The page of one of a record's figures."""
    how = Style(**{"scale": record.usual_scale, **style})
    return next(
        page for name, page in draw_figures(make_figures(record, how, query), how) if name == stem
    )


def stems(record: Any, query: str | None = None) -> list[str]:
    """The names of the files of a record's figures."""
    return [plate.stem for plate in make_figures(record, query=query)]


def looking_record(seed: int = 0, opening: Sequence[str] = ("<s>",)) -> Heatmap:
    """A record of words after two pictures of one white photo: 2 x 3 patches in rows that end in marks, and 1 x 2.

    Before the pictures stand the pieces of one word.
    """
    patches = [f"0:{row},{column}" for row in range(2) for column in range(3)]
    n_before = len(opening)
    labels = [
        *opening,
        *patches[:3],
        "|",
        *patches[3:],
        "|",
        "1:0,0",
        "1:0,1",
        "what",
        "is",
        "it",
        "a",
        "cat",
    ]
    first = n_before + 10
    n = len(labels)
    words = np.array([0] * n_before + list(range(1, n - n_before + 1)), np.int32)
    offsets = _offsets_after(labels, first)
    keys = tokens_of(
        labels,
        tuple(range(first)),
        n_given=first + 3,
        offsets=offsets,
        text="what is it a cat",
        words=words,
    )
    large = np.array([[0, 1, 2], [4, 5, 6]], np.int32) + n_before
    small = np.array([[8, 9]], np.int32) + n_before
    white = np.full((16, 24, 3), 255, np.uint8)
    pictures = (
        Picture(white, (2, 3), "white.png", (240, 160), large, (0, 0, 240, 160)),
        Picture(white[:8, :16], (1, 2), "white.png, small", (240, 160), small, (0, 0, 240, 160)),
    )
    queries = keys.take(np.arange(first, n))
    made = replace(map_of(queries, keys, kind="decoder", seed=seed), part=MapPart(first, 0, n, n))
    return record_of(made, text="what is it", pictures=pictures)


def _offsets_after(labels: Sequence[str], first: int) -> np.ndarray:
    """Offsets of labels in the text of those from `first` on, which are words; -1 for the others."""
    offsets = np.full((len(labels), 2), -1, np.int32)
    ends = np.cumsum([len(label) + 1 for label in labels[first:]]) - 1
    offsets[first:] = np.stack([ends - [len(label) for label in labels[first:]], ends], 1)
    return offsets
