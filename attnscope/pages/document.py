"""The page itself: what it shows as JSON and packed bytes, its script and style, in one HTML file."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.pages.packing import (
    FINE_STEP,
    FINE_UP_TO,
    LEFT_UNIT,
    PATCH_STEP,
    STEP,
    THUMBNAIL_SIDE,
    most_pieces,
    pack,
    pack_thumbnails,
)
from attnscope.pages.photos import pack_photos, with_ordinary_patches
from attnscope.records import AttentionMap, Heatmap, Tokens, write_whole
from attnscope.records.frame.record import Record
from attnscope.records.heads.descriptions import Descriptions
from attnscope.records.heads.findings import Findings
from attnscope.report.wording import label, printable
from attnscope.results.storage import PAGE_MARK, finite, plain
from attnscope.version import VERSION
from attnscope.views.heads.summary import MARKS, MORE_COLORS, marks_of

PAGE_SCHEMA = "attnscope.page/1"

MOST_WEIGHTS = 1 << 27
"""A page of more would be beyond what a browser opens in comfort."""

MODULES = (
    "colour", "data", "state", "dom", "pen", "heat", "heads", "grid", "why", "matrix", "links", "words", "text",
    "compare", "save",
)  # fmt: skip
"""The ES modules of every page, each after those that it imports."""

PARTS = {
    "atlas": ("wording", "catalog", "query", "scatter", "atlas", "cardfigure", "card", "examples", "head"),
    "photo": ("photo",),
    "saved": ("numbers", "archive", "recordtexts", "reading", "saved"),
}
"""The modules that only pages of some kind have, and a style sheet of that name; `app` follows all."""

_IMPORT = re.compile(r"^import\s+(?:[\w*{][^;]*?\s+from\s+)?\"\./(\w+)\.js\";\n", re.MULTILINE)
_INDENT = re.compile(r"^[ ]+", re.MULTILINE)
_EXPORT = re.compile(r"^export\s+(?=(?:async\s+)?(?:function|class|const|let)\b)", re.MULTILINE)
_DECLARED = re.compile(r"^(?:async\s+)?(?:function\*?|class|const|let)\s+(\w+)", re.MULTILINE)


@dataclass(frozen=True, eq=False)
class PageText:
    """One text of a page.

    Attributes:
        record: The attention of every head on it.
        full_width: By kind, for each layer of the map, the attention of one head over the full width of that layer,
            (layer, query, key): softmax of the layer's own queries and keys over all heads together. NaN, or no such
            kind: not known.
    """

    record: Heatmap
    full_width: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)


class Page:
    """One HTML file that shows attention; a notebook shows it where it stands.

    Attributes:
        html: The whole file.
    """

    def __init__(self, html: str) -> None:
        self.html = html

    def save(self, path: str | Path) -> Path:
        """Writes the file, whole or not at all.

        Raises:
            AttnscopeError: It cannot be written.
        """
        return write_whole(Path(path), self.html.encode())

    def _repr_html_(self) -> str:
        content = self.html.replace("&", "&amp;").replace('"', "&quot;")
        return (
            f'<iframe srcdoc="{content}" sandbox="allow-scripts allow-downloads" title="attnscope"'
            ' width="100%" height="760" style="border:1px solid #ccc"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page({len(self.html) / 2**20:.1f} MiB of HTML; .save(path) writes it)"


def page_of_record(record: Heatmap, *, findings: Findings | None = None) -> Page:
    """The page of one record, see `page_of`."""
    return page_of([PageText(record)], findings=findings)


def page_of(
    texts: Sequence[PageText],
    *,
    findings: Findings | None = None,
    start: Mapping[str, str] | None = None,
    atlas: Sequence[str] = (),
) -> Page:
    """Makes a page of one text or several, of an atlas, or of both.

    Args:
        texts: May be empty if there is an atlas.
        findings: Names the roles of heads.
        start: The first view, as the page's address names it: `{"v": "matrix", "h": "3.1"}`.
        atlas: The blocks of an atlas, as `page.atlas` packs them: the landing's, then one for each head.

    Raises:
        AttnscopeError: There is no text, no head to show, or more weights than a browser would hold.
    """
    if not (texts or atlas):
        raise AttnscopeError("a page needs a text")
    has_photos = any(text.record.picture is not None or text.record.pictures for text in texts)
    step = FINE_STEP if not texts or require_room(text.record for text in texts) <= FINE_UP_TO else STEP
    blocks: list[str] = list(atlas)
    manifest = _manifest(step)
    manifest["texts"] = [_describe_text(text, blocks, step) for text in texts]
    manifest["roles"] = None if findings is None else _describe_roles(findings)
    manifest["start"] = dict(start or {})
    if has_photos and not atlas:
        # One patch of hundreds seldom gets much: on a scale up to 1 none would be seen.
        manifest["start"] = {"scale": "head", **{k: v for k, v in manifest["start"].items() if k != "v"}}
    elif texts and not atlas and (head := head_to_open(texts[0].record)):
        manifest["start"] = {"h": f"{head[0]}.{head[1]}", **manifest["start"]}
    if atlas:
        manifest["atlas"] = {"landing": 0, "heads": list(range(1, len(atlas)))}
    return Page(_html(manifest, blocks, (*["atlas"] * bool(atlas), *["photo"] * has_photos)))


def _manifest(step: float) -> dict[str, Any]:
    """A page's manifest without data; `step` is the value of a code."""
    return {
        "schema": PAGE_SCHEMA, "version": VERSION, "step": step, "mostPieces": most_pieces(step),
        "leftUnit": LEFT_UNIT, "texts": [], "roles": None, "start": {},
    }  # fmt: skip


def head_to_open(record: Heatmap) -> tuple[int, int] | None:
    """The head that a page opens on: the one whose queries choose distant tokens most, each its own.

    A query's score is its largest weight above the key's mean over all queries, among keys that are neither special
    nor first and more than two tokens away. The head with the largest mean score is taken; None = no key is as far.
    """
    attention = record.maps[0]
    queries, keys = np.arange(len(attention.queries)), np.arange(len(attention.keys))
    counts = (np.abs(queries[:, None] - keys) > 2) & ~attention.keys.special & (keys > 0)
    heads = record.chosen(attention)
    if not heads or not counts.any():
        return None

    def score(head: tuple[int, int]) -> float:
        weights = attention.of(*head)
        return float(np.where(counts, weights - weights.mean(0), 0.0).max(1).mean())

    return max(heads, key=score)


def page_of_saved(record: Record, *, findings: Findings | None = None) -> Page:
    """Return the page of a saved record: the record itself, as an npz, and the code that reads it.

    Args:
        record: Pooled attention, heads, a comparison, relations or an ablation.
        findings: Not used, as the record has its roles' names.

    Raises:
        AttnscopeError: The record holds nothing.
    """
    if record.is_empty:
        raise AttnscopeError("there is nothing to show")
    saved = {
        "name": record.record_kind().file("npz"),
        "block": 0,
        "marks": {name: [mark.glyph, mark.color] for name, mark in MARKS.items()},
        "colors": list(MORE_COLORS),
        "columns": _column_facts(),
    }
    manifest = {**_manifest(FINE_STEP), "saved": saved}
    blocks = [base64.b64encode(zlib.compress(record.to_npz())).decode("ascii")]
    return Page(_html(manifest, blocks, ("atlas", "saved")))


def _column_facts() -> dict[str, dict[str, str]]:
    """What the columns of any table of heads mean, by their names in conditions."""
    nothing = Findings({}, {}, {}, (), descriptions=Descriptions((), 0, 0, 0))
    columns = [column for column in nothing.head_table().columns if column.what]
    return {
        (column.names or (column.name,))[0]: {"label": column.label, "what": column.what, "unit": column.unit}
        for column in columns
    }


def require_room(records: Iterable[Heatmap]) -> int:
    """Return the number of weights that a page of records would hold; their maps may be empty outlines.

    Raises:
        AttnscopeError: It is none, or more than a browser opens in comfort.
    """
    n = sum(_n_weights(record, attention) for record in records for attention in record.maps)
    if not n:
        raise AttnscopeError("there is no head to show")
    if n > MOST_WEIGHTS:
        raise AttnscopeError(
            f"a page of {n / 1e6:,.0f} million weights would be too large for a browser "
            f"(the most is {MOST_WEIGHTS / 1e6:,.0f} million)",
            "choose fewer layers and heads (-L, -H, --pick), or shorter or fewer texts",
        )
    return n


def _n_weights(record: Heatmap, attention: AttentionMap) -> int:
    """Return how many weights of a map a page holds."""
    every_head = itertools.product(attention.layers, attention.heads)
    n_heads = sum(layer in attention.layers and head in attention.heads for layer, head in record.picked or every_head)
    # A part of a map of words has a row for each column, of which the others are empty.
    is_square = attention.part is not None and not record.pictures
    n_rows = len(attention.keys if is_square else attention.queries)
    return n_heads * n_rows * len(attention.keys)


def _describe_text(text: PageText, blocks: list[str], step: float) -> dict[str, Any]:
    record = text.record
    # Its grids, matrices and links have a row for each column, and a photo among words is one of these.
    flat = record.with_pictures_as_one() if record.pictures else record
    squared = replace(flat.make_square(), pictures=record.pictures)  # of pictures, only special tokens are hidden
    packed = {
        "text": record.text,
        "title": printable(record.text, 120) or "(blank)",
        "run": plain(dict(record.run), finite),
        "changes": list(record.changes),
        "maps": [
            _describe_map(
                squared, attention, text.full_width.get(attention.kind), blocks,
                step if record.picture is None else PATCH_STEP,
                before=len(attention.queries) - len(whole.queries) if record.pictures else 0,
            ) for attention, whole in zip(squared.maps, record.maps, strict=True)
        ],
    }  # fmt: skip
    if record.picture is not None or record.pictures:
        packed["photos"] = pack_photos(record, blocks)
    if record.pictures:
        # Which of the rows above its first row is: a word is then the same one in all views.
        first = 0 if flat.maps[0].part is None else flat.maps[0].part[0]
        if flat.maps[0].kind == "cross":
            first = len(squared.maps[0].queries) - len(record.maps[0].queries)
        packed["looking"] = {
            **_describe_map(record, with_ordinary_patches(record), None, blocks, PATCH_STEP),
            "first": first,
        }
    return packed


def _describe_map(
    record: Heatmap,
    attention: AttentionMap,
    full: NDArray[np.float32] | None,
    blocks: list[str],
    step: float,
    before: int = 0,
) -> dict[str, Any]:
    heads = record.chosen(attention)
    maps = [attention.of(*head) for head in heads]
    full_maps = {} if full is None else {
        layer: weights for layer, weights in zip(attention.layers, full, strict=True) if not np.isnan(weights).any()
    }  # fmt: skip
    chunks = []
    hidden_queries, hidden_keys = record.sinks(attention)
    for chunk in pack([*maps, *full_maps.values()], attention.keys, hidden_keys, step):
        chunks.append([len(blocks), list(chunk.heads)])
        blocks.append(chunk.data)
    rows_shown = [weights[before:] for weights in maps]
    thumbnails = None
    if maps and max(rows_shown[0].shape) > THUMBNAIL_SIDE:
        thumbnails = len(blocks)
        blocks.append(pack_thumbnails(rows_shown))
    has_own_keys = attention.kind == "cross" or attention.part is not None or before > 0
    return {
        "kind": attention.kind,
        "heads": [list(head) for head in heads],
        "full": list(full_maps),
        # How much of its attention a head gives to one key, over queries: the grid can be sorted by it.
        "focus": [round(float(weights.max(-1).mean()), 4) for weights in rows_shown],
        "largest": [round(float(weights.max(initial=0.0)), 6) for weights in rows_shown],
        "thumbnails": thumbnails,
        "queries": _describe_tokens(attention.queries, hidden_queries),
        "keys": _describe_tokens(attention.keys, hidden_keys) if has_own_keys else None,
        "chunks": chunks,
        **({"before": before} if before else {}),  # rows that are not kept, and that no view shows
        **({"step": step, "mostPieces": most_pieces(step)} if step == PATCH_STEP else {}),
    }


def _describe_tokens(tokens: Tokens, hidden: NDArray[np.bool_]) -> dict[str, Any]:
    groups = None if tokens.words is None else tokens.word_groups()
    return {
        "labels": [printable(text, 80) or "\ufffd" for text in tokens.labels],
        "offsets": tokens.offsets.ravel().tolist(),
        "special": np.flatnonzero(tokens.special).tolist(),
        # Tokens that go where special tokens are hidden, if it is not these alone.
        **({} if np.array_equal(hidden, tokens.special) else {"hidden": np.flatnonzero(hidden).tolist()}),
        "segments": tokens.segments.tolist() if tokens.segments.any() else None,
        "groups": None if groups is None else [len(group) for group in groups],
        "words": None if groups is None else [printable(text, 80) or "\ufffd" for text in tokens.merge(groups).labels],
        "text": tokens.text,
        "pair": tokens.pair,
        "given": tokens.n_given,
    }


def _describe_roles(findings: Findings) -> dict[str, Any]:
    heads: dict[str, dict[str, Any]] = {}
    for head in findings.heads:
        heads.setdefault(head.kind, {})[f"{head.layer}.{head.head}"] = [
            {"name": role.name, "value": finite(round(role.value, 4)), "low": finite(role.low),
             "high": finite(role.high), "tentative": role.tentative}
            for role in head.roles
        ]  # fmt: skip
    return {
        "marks": {
            name: {"glyph": mark.glyph, "color": mark.color, "label": label(name),
                   "what": findings.role_facts(name).what}
            for name, mark in marks_of(findings).items()
        },
        "heads": heads,
        "model": str(findings.run.get("model", "")),
        "sha256": str(findings.run.get("sha256", "")),
    }  # fmt: skip


@cache
def script(*parts: str) -> str:
    """The page's modules joined into one: imports and exports go, as all names are in one scope."""
    source = files("attnscope.pages") / "src"
    joined, modules = [], (*MODULES, *(name for part in parts for name in PARTS[part]), "app")
    for name in modules:
        text = (source / f"{name}.js").read_text(encoding="utf-8")
        for needed in _IMPORT.findall(text):
            if needed not in modules[: modules.index(name)]:
                raise ValueError(f"{name}.js imports {needed}.js, which does not come before it")
        joined.append(_EXPORT.sub("", _IMPORT.sub("", text)))
    whole = '"use strict";\n' + "\n".join(joined)
    if again := [name for name, n in Counter(_DECLARED.findall(whole)).items() if n > 1]:
        raise ValueError(f"two modules, which share one scope, declare {', '.join(sorted(again))}")
    if any(line.count("`") % 2 for line in whole.splitlines()):
        raise ValueError("a text in backticks that goes over lines: its indentation would be lost")
    # In ASCII: one letter beyond Latin-1 makes a browser hold the whole file, data and all, in 16 bits a letter, and
    # take twice as long to read it. Python's escapes up to U+FFFF are JavaScript's too.
    whole = _INDENT.sub("", whole).encode("ascii", "backslashreplace").decode()
    if "</script" in whole.lower() or "<!--" in whole or "\\U" in whole:
        raise ValueError("a script that ends its own element, or a letter that JavaScript escapes otherwise")
    return whole


@cache
def style(*parts: str) -> str:
    """The page's style sheet."""
    source = files("attnscope.pages") / "src"
    sheet = "".join((source / f"{name}.css").read_text(encoding="utf-8") for name in ("style", "views", *parts))
    return re.sub(r"[^\x00-\x7f]", lambda letter: f"\\{ord(letter[0]):x} ", _INDENT.sub("", sheet))


def policy_hash(text: str) -> str:
    """The name of an inline script or style in a Content-Security-Policy."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _html(manifest: Mapping[str, Any], blocks: Sequence[str], parts: Sequence[str] = ()) -> str:
    """The file."""
    # JSON inside of a script element: "<" could end it. Surrogates that stand alone are no UTF-8; as escapes they are.
    data = json.dumps(manifest, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    code, css = script(*parts), style(*parts)
    policy = (
        f"default-src 'none'; script-src {policy_hash(code)}; style-src {policy_hash(css)}; "
        "img-src data: blob:; connect-src 'none'; form-action 'none'; base-uri 'none'"
    )
    return "".join((
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        '<meta name="referrer" content="no-referrer">\n',
        f'{PAGE_MARK.decode()}{VERSION}">\n<title>attnscope</title>\n',
        f"<style>{css}</style>\n</head>\n<body>\n",
        "<noscript>This page draws attention weights with a script of its own, and needs JavaScript.</noscript>\n",
        f'<script type="application/json" id="manifest">{data}</script>\n',
        *(f'<script type="text/plain" id="d{n}">{block}</script>\n' for n, block in enumerate(blocks)),
        f'<script type="module">{code}</script>\n</body>\n</html>\n',
    ))  # fmt: skip
