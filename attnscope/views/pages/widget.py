"""A page in a notebook, by anywidget: the same app in a frame of its own, and what is chosen in it as traits."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Any

import anywidget
import traitlets

from attnscope.records.frame.record import Record
from attnscope.records.maps.head_maps import MapsRecord
from attnscope.records.maps.heatmap import Heatmap
from attnscope.records.maps.tokens import Tokens
from attnscope.records.relations.record import Relations

_HEAD = re.compile(r"(?:(?:encoder|decoder|cross) )?L(\d+)H\d+|mean(\d*)|full(\d+)|")
_LAYER = re.compile(r"(L|mean|full)\d*")
_MANIFEST = re.compile(r'id="manifest">(.*?)</script>', re.DOTALL)
_OF_TEXTS = ("grid", "matrix", "links", "text", "compare", "headcount")
_CHOSEN = ("view", "text", "kind", "head", "layer", "query", "key", "height")
_KINDS = ("encoder", "decoder", "cross")


class Widget(anywidget.AnyWidget):
    """What `attnscope.widget` gives: the page, and what is chosen in it.

    Each trait follows the page, and the page follows it; `widget.observe(function, "head")` tells of changes.

    Attributes:
        view: The view: "grid", "matrix", "links", "text", "compare", "photo", "headcount"; of records about heads
            "atlas" (all heads), "head", and of relations and comparisons "numbers" (their grid).
        text: The number of the text, from 0.
        kind: "encoder", "decoder" or "cross"; empty where all heads are shown.
        head: Such as "L3H1"; "mean" of all heads, "mean3" of layer 3, "full3" for the full-width head of layer 3.
        layer: That of `head`; with another one the head of the same number there is chosen. None = of several.
        query: The place of the query token, from 0; None = none. A token may be given, a word, or "@3": the first that
            is meant. Of a pooled map the number of the row of cells, of an atlas the place in the example.
        key: The same of the key.
        height: Of the frame, in pixels.
    """

    _esm = files("attnscope.views.page").joinpath("notebook.js").read_text("utf-8")

    _page = traitlets.Unicode().tag(sync=True)
    height = traitlets.Int(640, min=100).tag(sync=True)
    view = traitlets.Unicode().tag(sync=True)
    text = traitlets.Int(0, min=0).tag(sync=True)
    kind = traitlets.Unicode().tag(sync=True)
    head = traitlets.Unicode().tag(sync=True)
    layer = traitlets.Int(None, allow_none=True)
    query = traitlets.Union([traitlets.Int(None, allow_none=True), traitlets.Unicode()], default_value=None).tag(
        sync=True
    )
    key = traitlets.Union([traitlets.Int(None, allow_none=True), traitlets.Unicode()], default_value=None).tag(
        sync=True
    )

    def __init__(self, page: str, record: Record | None = None, **traits: Any) -> None:
        """Opens a page of HTML; a record of attention says which heads there are, and which tokens words mean."""
        self._record = record if isinstance(record, MapsRecord) else None
        self._views, self._kinds = _held(page, record)
        super().__init__(_page=page, **traits)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and not hasattr(type(self), name):
            raise AttributeError(f"there is no {name!r} to choose; there are {', '.join(_CHOSEN)}")
        super().__setattr__(name, value)

    @traitlets.validate("view")
    def _known_view(self, proposal: Any) -> str:
        view: str = proposal["value"]
        if view and view not in self._views:
            raise traitlets.TraitError(f"there is no view {view!r} here; there are {', '.join(self._views)}")
        return view

    @traitlets.validate("kind")
    def _known_kind(self, proposal: Any) -> str:
        kind: str = proposal["value"]
        if kind and kind not in self._kinds:
            raise traitlets.TraitError(f"there is no {kind!r} attention here; there is {', '.join(self._kinds)}")
        return kind

    @traitlets.validate("head")
    def _known_head(self, proposal: Any) -> str:
        head: str = proposal["value"]
        found = _HEAD.fullmatch(head)
        if not found:
            raise traitlets.TraitError(f"{head!r} names no head; one is called such as L3H1, a mean mean or mean3")
        if self._record is not None and found[1] is not None:
            place = (int(found[1]), int(head.rpartition("H")[2]))
            if not any(place in self._record.chosen(attention) for attention in self._record.maps):
                raise traitlets.TraitError(f"the record does not show head {head}")
        return head

    @traitlets.validate("query", "key")
    def _place(self, proposal: Any) -> int | None:
        """The place of what was given, a token or its place."""
        value = proposal["value"]
        name = proposal["trait"].name
        if value is None or (value == -1 and not isinstance(value, str)):
            return None
        tokens = self._tokens(name)
        if isinstance(value, str):
            if tokens is None:
                raise traitlets.TraitError(f"the {name} is the number of a token here, not {value!r}")
            if not (found := tokens.find(value)):
                raise traitlets.TraitError(f"no token is meant by {value!r}: {tokens.list_labels()}")
            return int(found[0])
        if value < 0 or (tokens is not None and value >= len(tokens)):
            raise traitlets.TraitError(f"there is no token {value}" + (f" of {len(tokens)}" if tokens else ""))
        return int(value)

    def _tokens(self, name: str) -> Tokens | None:
        """Those of the queries or keys that are shown; None where Python does not know them, or they are pooled."""
        maps = self._record.maps if self._record is not None and isinstance(self._record, Heatmap) else ()
        for attention in maps:
            if self.kind in ("", attention.kind):
                tokens: Tokens = attention.queries if name == "query" else attention.keys
                return tokens
        return None

    @traitlets.observe("head")
    def _follow_head(self, change: Any) -> None:
        self.layer = _layer_of(change["new"])

    @traitlets.observe("layer")
    def _follow_layer(self, change: Any) -> None:
        layer = change["new"]
        if layer is None or layer == _layer_of(self.head):
            return
        try:
            self.head = _LAYER.sub(rf"\g<1>{layer}", self.head, count=1) if self.head else f"L{layer}H0"
        except traitlets.TraitError:
            self.layer = change["old"]
            raise


def _held(page: str, record: Record | None) -> tuple[list[str], tuple[str, ...]]:
    """The views that a page has, as its script names them, and the kinds of attention that may be chosen in it."""
    found = _MANIFEST.search(page)
    manifest = json.loads(found[1]) if found else {}
    if "viewer" not in manifest:
        texts, is_atlas = manifest.get("texts", ()), "atlas" in manifest
        kinds = {attention["kind"] for text in texts for attention in text["maps"]}
        views = [*(["atlas", "head"] * is_atlas), *(["photo"] * any("photos" in text for text in texts))]
        views += _OF_TEXTS if texts else ("matrix", "links") * is_atlas  # of its examples
        return views, tuple(kind for kind in _KINDS if kind in kinds) or _KINDS
    if isinstance(record, MapsRecord):
        return [*_OF_TEXTS], tuple(attention.kind for attention in record.maps)
    shape = getattr(record, "shape", None)
    if shape in ("texts", "pick"):
        return [*_OF_TEXTS], _KINDS
    has_grid = shape is not None or isinstance(record, Relations)
    return [*(["numbers"] * has_grid), "atlas", "head"], _KINDS


def _layer_of(head: str) -> int | None:
    """The layer that the name of a head names."""
    found = _HEAD.fullmatch(head)
    layer = next(filter(None, found.groups()), None) if found else None
    return None if layer is None else int(layer)
