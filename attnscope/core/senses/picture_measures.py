"""The catalogue of what heads of vision transformers are measured for, and what that must know of a picture.

Every measure is a sum and a count for each picture and head, as in `core.measures`; a value is sum / count over all
pictures. Queries are the patches; those of [CLS] are measured apart (`…_from_cls`). Measures of places, colours or
edges are about patches alone: the sum over patch keys, divided by all the mass on them, which `resting` tells.

`picture_sums` adds the measures up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attnscope.core.catalogue import Measure

Floats = NDArray[np.float64]


_INF = math.inf
_DOSOVITSKIY = "Dosovitskiy et al. 2021, appendix D.7 (there in pixels)"
_CLARK = "Clark et al. 2019, section 3.3"

PICTURE_MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("distance_patches", "attends far away in the picture",
                       "sum of A_qk times the Euclidean distance of patches q and k, a patch being 1 / sum of a_q",
                       "patches", 0, _INF, _DOSOVITSKIY),
        Measure("rows_apart_patches", "attends far up and down",
                       "sum of A_qk |row(q) - row(k)| over patches k / sum of a_q", "patches", 0, _INF, "ours"),
        Measure("columns_apart_patches", "attends far left and right",
                       "sum of A_qk |column(q) - column(k)| over patches k / sum of a_q", "patches", 0, _INF, "ours"),
        Measure("self_patch", "attends to the patch itself",
                       "sum of A_qq / sum of a_q", "share", 0, 1, "ours"),
        Measure("near_patches", "attends to the up to 8 patches around, without itself",
                       "sum of A_qk over k != q at most 1 row and 1 column away / sum of a_q", "share", 0, 1, "ours"),
        Measure("similar_colour", "attends to other patches of its own colour",
                       "sum of A_qk over patches k != q no farther in colour than the median of q's distances to the "
                       "others / sum of (a_q - A_qq); colour: CIELAB of the patch's mean light", "share", 0, 1, "ours"),
        Measure("edges", "attends to patches with many edges",
                       "sum of A_qk g_k / sum of a_q; g_k: mean gradient of luma in patch k / that of the picture",
                       "times the picture's mean", 0, _INF, "ours"),
        Measure("max_weight", "is confident: puts much on a single patch",
                       "sum of the largest A_qk over patches k / sum of a_q", "share", 0, 1,
                       "Voita et al. 2019, confidence"),
        Measure("entropy_nats", "spreads over many keys",
                       "- sum over all k of A_qk ln A_qk / patches", "nats", 0, _INF, _CLARK),
        Measure("resting", "rests on tokens that are no patch",
                       "sum of A_qk over k that are no patch / patches", "share", 0, 1, "ours"),
        Measure("cls", "attends to [CLS]", "sum of A[q, CLS] / patches", "share", 0, 1, "ours"),
        Measure("registers", "attends to registers",
                       "sum of A_qk over registers k / patches", "share", 0, 1, "ours; Darcet et al. 2024"),
        Measure("edges_from_cls", "as [CLS], attends to patches with many edges",
                       "sum of A_qk g_k / sum of a_q, q = [CLS]", "times the picture's mean", 0, _INF, "ours"),
        Measure("entropy_nats_from_cls", "as [CLS], spreads over many keys",
                       "- sum over all k of A_qk ln A_qk, q = [CLS]", "nats", 0, _INF, _CLARK),
        Measure("resting_from_cls", "as [CLS], rests on tokens that are no patch",
                       "sum of A_qk over k that are no patch, q = [CLS]", "share", 0, 1, "ours"),
    )
}  # fmt: skip
"""All picture measures by name. q runs over the patches (`_from_cls`: is [CLS]), k over the keys named, and a_q is the
sum of A_qk over patches k."""


@dataclass(frozen=True, eq=False)
class PictureFacts:
    """What measures must know of a picture.

    Attributes:
        grid: Rows and columns of patches.
        n_before: How many tokens stand before the patches.
        cls: Where [CLS] stands; None = there is none.
        registers: Where registers stand.
        colours: CIELAB (D65) of each patch's mean light, (patch, 3): L* 0 to 100, a*, b*.
        reach: Square of each patch's median colour distance to the other patches, (patch,): of an even number of
            distances the lower middle one. Infinite if there is no other patch.
        edges: Gradient of luma in each patch, relative to the picture's mean, (patch,); None if there is none.
    """

    grid: tuple[int, int]
    n_before: int
    cls: int | None
    registers: tuple[int, ...]
    colours: Floats
    reach: Floats
    edges: Floats | None

    @property
    def n_patches(self) -> int:
        """How many patches there are."""
        return self.grid[0] * self.grid[1]


def picture_facts(pixels: NDArray[np.uint8], grid: tuple[int, int], before: Sequence[str]) -> PictureFacts:
    """The facts of a picture.

    Args:
        pixels: What the model saw, (height, width, 3), sRGB, whole patches.
        grid: Rows and columns of patches.
        before: The tokens before the patches, such as ("CLS", "REG0").

    Raises:
        ValueError: The pixels cannot be divided into that many patches.
    """
    (rows, columns), (height, width) = grid, pixels.shape[:2]
    if min(grid) < 1 or pixels.shape[2:] != (3,) or height % rows or width % columns:
        raise ValueError(f"pixels {pixels.shape} are no {rows} x {columns} patches of three colours")
    values = pixels.astype(np.float64) / 255
    colours = cielab(_patch_means(_linear_light(values), grid))
    edges = _patch_means(gradient(values)[..., None], grid)[:, 0]
    mean = edges.mean()
    return PictureFacts(
        grid=grid,
        n_before=len(before),
        cls=list(before).index("CLS") if "CLS" in before else None,
        registers=tuple(at for at, name in enumerate(before) if name.startswith("REG")),
        colours=colours,
        reach=_median_distances(colours),
        edges=edges / mean if mean > 0 else None,
    )


def gradient(values: Floats) -> Floats:
    """How steep luma is at each pixel, (height, width): the length of its gradient by central differences.

    Luma is 0.2126 R + 0.7152 G + 0.0722 B (ITU-R BT.709) of the sRGB values as they are; at the rim differences are
    one-sided, and along a side of a single pixel 0.

    Args:
        values: (height, width, 3), 0 to 1.
    """
    luma = values @ np.array([0.2126, 0.7152, 0.0722])
    steps = [np.gradient(luma, axis=axis) if luma.shape[axis] > 1 else np.zeros_like(luma) for axis in (0, 1)]
    steep: Floats = np.hypot(*steps)
    return steep


def cielab(linear: Floats) -> Floats:
    """CIELAB under D65 of linear light, (…, 3) -> (…, 3).

    Source: CIE 15 (CIE 1976 L*a*b*), with the matrix of sRGB (IEC 61966-2-1), whose white is (1, 1, 1).
    """
    matrix = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]],
    )
    xyz = linear @ (matrix / matrix.sum(1, keepdims=True)).T
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    x, y, z = np.moveaxis(f, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def _linear_light(values: Floats) -> Floats:
    """Amounts of light of sRGB values, 0 to 1 (IEC 61966-2-1)."""
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def _patch_means(values: Floats, grid: tuple[int, int]) -> Floats:
    """Means over the pixels of each patch, (height, width, channel) -> (patch, channel)."""
    (rows, columns), (height, width, channels) = grid, values.shape
    cut = values.reshape(rows, height // rows, columns, width // columns, channels)
    means: Floats = cut.mean((1, 3)).reshape(rows * columns, channels)
    return means


def _median_distances(colours: Floats) -> Floats:
    """See PictureFacts.reach; a few rows at a time."""
    n = len(colours)
    reach = np.full(n, np.inf)
    for first in range(0, n if n > 1 else 0, 128):
        rows = np.arange(first, min(n, first + 128))
        squares = sum(((colours[rows, None, c] - colours[None, :, c]) ** 2 for c in range(3)), np.zeros(()))
        squares[np.arange(len(rows)), rows] = np.inf
        reach[rows] = np.partition(squares, n // 2 - 1, axis=1)[:, n // 2 - 1]
    return reach
