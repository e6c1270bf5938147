"""From what was asked for on the command line to a trace and its files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.models.catalog import read_config
from attnscope.models.own.layouts import supports
from attnscope.records.teaching.trace import Trace
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import Prompt
from attnscope.studies.teaching.trace import trace, trace_example, trace_plain
from attnscope.text import read_text


@dataclass(frozen=True)
class TraceOrder:
    """What is to be traced.

    Attributes:
        text: The text; "-" reads stdin; None, and no file: the worked example.
        file: A file with the text.
        target: What an encoder-decoder is to write.
        layer: Which layer.
        heads: Which heads of it; None = all of the worked example's.
        token: The query to follow; None = all.
        kind: Which attention of an encoder-decoder.
        loops: Whether the steps are computed in plain loops.
    """

    text: str | None = None
    file: Path | None = None
    target: str | None = None
    layer: int | None = None
    heads: tuple[int, ...] | None = None
    token: str | None = None
    kind: str | None = None
    loops: bool = False

    def __post_init__(self) -> None:
        has_text = self.text is not None or self.file is not None
        if has_text and (self.layer is None or self.heads is None):
            raise UsageError("the trace of a text shows single heads", "give a layer and heads, such as -L 3 -H 1")
        if not has_text and (self.layer or self.target is not None or self.kind is not None):
            raise UsageError("without a text the worked example is traced, which has one layer", "give a TEXT")


def study(spec: str, order: TraceOrder, loading: LoadOptions) -> Trace:
    """Traces what is asked for.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    if order.text is None and order.file is None:
        return trace_example(order.token, order.heads, engine="reference" if order.loops else loading.engine)
    prompt = Prompt(read_text(order.text, order.file), target=order.target)
    source = loading.resolve(spec)
    assert order.layer is not None
    if order.loops and source.folder is not None and supports(read_config(source)) is None:
        from attnscope.models.own.plain import load_plain

        return trace_plain(load_plain(source, "float64"), prompt, order.layer, order.heads, token=order.token)
    return trace(
        loading.load(source), prompt, order.layer, order.heads, token=order.token, kind=order.kind, loops=order.loops
    )
