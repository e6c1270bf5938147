"""From what was asked for on the command line to costs and their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.records.cost import Cost
from attnscope.studies.cost import cost, find_sizes
from attnscope.studies.inputs import named_formats, require_writable
from attnscope.text import slug
from attnscope.views.figures import FIGURE_FORMATS

_HOME = Path("attnscope-out")


@dataclass(frozen=True)
class CostOrder:
    """What is to be counted.

    Attributes:
        model: A preset, a name, a folder, a config.json or a Hub id; None = the sizes alone.
        n_tokens: Length of the text; None = the model's limit.
        dtype: Precision of the scores.
        sizes: Sizes that are given; None = not given.
        plot: Whether a figure is drawn, in a folder of its own where none is given.
        out: A folder for files.
        formats: Which files: some of json, png, svg, pdf, in a list; None = json and png.
    """

    model: str | None
    n_tokens: int | None = None
    dtype: str = "float16"
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    plot: bool = False
    out: Path | None = None
    formats: str | None = None

    def __post_init__(self) -> None:
        if self.formats is not None and self.out is None and not self.plot:
            raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")


def counted(order: CostOrder) -> tuple[Cost, list[Path]]:
    """Counts what is asked for, and writes the files that are wanted.

    Returns:
        The record, and the files.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    formats = named_formats(order.formats or "json,png", ("json", *FIGURE_FORMATS))
    if order.out is not None:
        require_writable(order.out)
    record = cost(find_sizes(order.model, **order.sizes), order.n_tokens, dtype=order.dtype)
    if order.out is None and not order.plot:
        return record, []
    folder = order.out or _HOME / f"cost-{slug(record.name)}"
    return record, drawn(record, folder, formats)


def drawn(record: Cost, out: Path, formats: tuple[str, ...]) -> list[Path]:
    """Writes the files of a cost: `cost.json` and figures."""
    paths = [record.save(out / "cost.json")] if "json" in formats else []
    return paths + record.draw(out, tuple(name for name in formats if name != "json"))
