"""Draw maps side by side in the same colours: attention weights, or differences of them. Used by three questions."""

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
    """A map with its title: weights or differences, (query, key), and the labels of rows and columns."""

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
        notes: Sentences on how to read them.
        difference_meaning: What a number means if the maps hold differences; empty = they hold weights.
        largest_px: Most width of a map.
        is_fitted: Whether the darkest colour is that of the largest weight of all maps; else it is that of 1.
    """

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = (AXES,)
    difference_meaning: str = ""
    largest_px: float = math.inf
    is_fitted: bool = False

    def draw(self, report: Report, lettering: Lettering) -> MapsPage:
        """Return a page with all maps and their colour bar."""
        maps = [panel.values for panel in self.panels]
        # Colours of weights begin at 0, those of differences are symmetric: white = no change.
        high = 1.0
        if self.difference_meaning or self.is_fitted:
            high = max(float(np.nan_to_num(np.abs(values)).max(initial=0.0)) for values in maps) or 1.0
        limits = (-high if self.difference_meaning else 0.0, high)
        # One pair of axes for all maps if all have the same tokens.
        axes = [(panel.queries, panel.keys) for panel in self.panels]
        if len({*axes}) == 1:
            axes = axes[:1]
        weight_meaning = "attention weight: the share of a query's attention that a key gets"
        figure = MapsFigure(
            subtitle=report.subtitle,
            notes=(*self.notes, *report.footer),
            axes=tuple(axes),
            titles=tuple(panel.title for panel in self.panels),
            meaning=self.difference_meaning or weight_meaning,
            cmap=TWO_WAYS if self.difference_meaning else ONE_WAY,
            largest_px=self.largest_px,
            # The fonts must hold the title of the page too.
            lettered=(report.model, self.title),
        )
        # Maps with more cells than the paper has pixels are pooled: each cell keeps its largest size, with its sign.
        page = MapsPage(figure, lettering.paper)
        pooled = []
        for values in maps:
            highest = max_pool(values.astype(np.float32), page.pool)
            lowest = -max_pool(-values.astype(np.float32), page.pool)
            pooled.append(np.where(highest >= -lowest, highest, lowest))
        ticks = tick_texts(layout.ticks_between(*limits))
        # The colour bar has the limits that all maps share.
        page.show(
            f"{report.model} · {self.title}", pooled, [limits] * len(maps), bar_ends=limits, ticks=ticks
        )
        return page
