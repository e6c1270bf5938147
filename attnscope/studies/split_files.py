"""From what was asked for on the command line to a split and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.records.split import Split
from attnscope.studies.inputs import LoadOptions, named_formats, require_writable
from attnscope.studies.reading import Prompt
from attnscope.studies.split import SplitOptions, split, split_example
from attnscope.text import read_text
from attnscope.views.figures import FIGURE_FORMATS


@dataclass(frozen=True)
class SplitOrder:
    """What is to be split.

    Attributes:
        text: The text; "-" reads stdin; None, and no file: the worked example.
        file: A file with the text.
        layer: Which layer.
        options: How it is cut.
        out: A folder for the files; None = no files.
        formats: Which files: some of json, png, svg, pdf, in a list; None = json and png.
    """

    text: str | None = None
    file: Path | None = None
    layer: int | None = None
    options: SplitOptions = SplitOptions()
    out: Path | None = None
    formats: str | None = None

    def __post_init__(self) -> None:
        has_text = self.text is not None or self.file is not None
        if has_text and self.layer is None:
            raise UsageError("of a model, the heads of one layer are cut", "give a layer, such as -L 3")
        if not has_text and self.layer:
            raise UsageError("without a text the worked example is cut, which has one layer", "give a TEXT")
        if self.formats is not None and self.out is None:
            raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")


def split_and_written(spec: str, order: SplitOrder, loading: LoadOptions) -> tuple[Split, list[Path]]:
    """Splits what is asked for, and writes the files that are wanted.

    Returns:
        The record, and the files.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    formats = named_formats(order.formats or "json,png", ("json", *FIGURE_FORMATS))
    if order.out is not None:
        require_writable(order.out)
    if order.text is None and order.file is None:
        record = split_example(order.options)
    else:
        prompt = Prompt(read_text(order.text, order.file))
        source = loading.resolve(spec)
        assert order.layer is not None
        record = split(loading.load(source), prompt, order.layer, order.options)
    return record, [] if order.out is None else drawn(record, order.out, formats)


def drawn(record: Split, out: Path, formats: tuple[str, ...]) -> list[Path]:
    """Writes the files of a split: `split.json` and figures."""
    paths = [record.save(out / "split.json")] if "json" in formats else []
    return paths + record.draw(out, tuple(name for name in formats if name != "json"))
