"""Draw attention maps, or differences of two maps, side by side in the same colours.

A panel is one map of the page, with its title and the labels of its axes.
"""

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
from attnscope.report.numbers import format_ticks

AXES_NOTE = "rows: queries (attend) · columns: keys (are attended to)"


@dataclass(frozen=True, eq=False)
class Panel:
    """A map of a page.

    Attributes:
        title: The title above the map.
        values: Attention weights, or differences of weights, (query, key).
        queries: The labels of the rows.
        keys: The labels of the columns.
    """

    title: str
    values: NDArray[Any]
    queries: Axis
    keys: Axis


@dataclass(frozen=True, eq=False)
class Panels:
    """A page of maps in the same colours: attention weights, or differences of weights.

    The colour scale of weights begins at 0. The colour scale of differences is symmetric about 0, which is white.

    Attributes:
        title: The title of the figure, after the model.
        panels: The maps.
        notes: Sentences on how to read the maps.
        difference_meaning: What a number means if the maps hold differences; empty = they hold weights.
        max_panel_px: The largest width of a map.
        is_fitted: Whether the darkest colour of weights stands for the largest weight of all maps. If not, it stands
            for 1. The darkest colour of differences always stands for the largest difference.
    """

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = (AXES_NOTE,)
    difference_meaning: str = ""
    max_panel_px: float = math.inf
    is_fitted: bool = False

    def draw(self, report: Report, lettering: Lettering) -> MapsPage:
        """Return a page with all maps and their colour bar."""
        maps = [panel.values for panel in self.panels]
        # The scale ends at 1 or at the largest value of all maps. If all values are 0, it ends at 1.
        high = 1.0
        if self.difference_meaning or self.is_fitted:
            high = max(float(np.nan_to_num(np.abs(values)).max(initial=0.0)) for values in maps) or 1.0
        limits = (-high if self.difference_meaning else 0.0, high)
        # One entry of `map_axes` stands for all maps: if all have the same tokens, the labels are drawn once.
        map_axes = [(panel.queries, panel.keys) for panel in self.panels]
        if len({*map_axes}) == 1:
            map_axes = map_axes[:1]
        weight_meaning = "attention weight: the share of a query's attention that a key gets"
        figure = MapsFigure(
            subtitle=report.subtitle,
            notes=(*self.notes, *report.footer),
            axes=tuple(map_axes),
            titles=tuple(panel.title for panel in self.panels),
            meaning=self.difference_meaning or weight_meaning,
            cmap=TWO_WAYS if self.difference_meaning else ONE_WAY,
            max_panel_px=self.max_panel_px,
            # Texts outside the figure for which fonts with all letters are needed, too.
            font_texts=(report.model, self.title),
        )
        # Maps with more cells than the paper has pixels are pooled: a block of `page.pool` x `page.pool` values becomes
        # the one that is farthest from 0, with its sign. Without pooling, `max_pooled` and
        # `min_pooled` are both the values themselves.
        page = MapsPage(figure, lettering.paper)
        pooled_maps = []
        for values in maps:
            max_pooled = max_pool(values.astype(np.float32), page.pool)
            min_pooled = -max_pool(-values.astype(np.float32), page.pool)
            pooled_maps.append(np.where(max_pooled >= -min_pooled, max_pooled, min_pooled))
        ticks = format_ticks(layout.ticks_between(*limits))
        page.set_values(
            f"{report.model} · {self.title}",
            pooled_maps,
            [limits] * len(maps),
            bar_ends=limits,
            ticks=ticks,
        )
        return page
