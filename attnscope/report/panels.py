"""Draw maps side by side in the same colours: attention weights, or how they differ. It knows no question."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.drawing import layout
from attnscope.drawing.cells import max_pool
from attnscope.drawing.lettering import Lettering
from attnscope.drawing.map_figure import Axis, MapsFigure
from attnscope.drawing.maps import MapsPage
from attnscope.report.blocks import Report
from attnscope.report.head_maps import ONE_WAY, TWO_WAYS
from attnscope.report.numbers import tick_texts

AXES = "rows: queries (attend) · columns: keys (are attended to)"


@dataclass(frozen=True, eq=False)
class Panel:
    """A map with its title: weights, (query, key), and the labels at its sides."""

    title: str
    values: NDArray[Any]
    queries: Axis
    keys: Axis


@dataclass(frozen=True, eq=False)
class Panels:
    """Maps side by side in the same colours: weights on a scale from 0 to 1, or differences on one with a sign.

    Attributes:
        title: The title of the figure, after the model.
        panels: The maps.
        notes: What must be known to read them.
        difference: What a difference is; empty = the maps hold weights.
        largest_px: Most width of a map.
        is_fitted: Whether the darkest colour is the largest weight of all maps; else it is 1.
    """

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = (AXES,)
    difference: str = ""
    largest_px: float = math.inf
    is_fitted: bool = False

    def draw(self, report: Report, lettering: Lettering) -> MapsPage:
        """Return the page."""
        # Weights run from 0 to 1 or to the largest; differences are symmetric around 0: white means no change.
        low, high = 0.0, 1.0
        if self.difference or self.is_fitted:
            high = (
                max(float(np.nan_to_num(np.abs(panel.values)).max(initial=0.0)) for panel in self.panels)
                or 1.0
            )
        if self.difference:
            low = -high
        # Maps with the same tokens share their labels.
        axes = [(panel.queries, panel.keys) for panel in self.panels]
        figure = MapsFigure(
            subtitle=report.subtitle,
            notes=(*self.notes, *report.footer),
            axes=tuple(axes[:1] if len({*axes}) == 1 else axes),
            titles=tuple(panel.title for panel in self.panels),
            meaning=self.difference
            or "attention weight: the share of a query's attention that a key gets",
            cmap=TWO_WAYS if self.difference else ONE_WAY,
            largest_px=self.largest_px,
            lettered=(report.model, self.title),
        )
        # A long text is pooled to what the paper has pixels for; pooling keeps the sign of a difference.
        page = MapsPage(figure, lettering.paper)
        values = []
        for panel in self.panels:
            weights = panel.values.astype(np.float32)
            highest, deepest = max_pool(weights, page.pool), max_pool(-weights, page.pool)
            values.append(np.where(highest >= deepest, highest, -deepest))
        ticks = tick_texts(layout.ticks_between(low, high))
        page.show(
            f"{report.model} · {self.title}", values, [(low, high)] * len(values), (low, high), ticks
        )
        return page
