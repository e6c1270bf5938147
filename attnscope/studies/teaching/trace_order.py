"""From what was asked for on the command line to a trace."""

from __future__ import annotations

from attnscope.errors import UsageError
from attnscope.models.catalog import read_config
from attnscope.models.own.layouts import supports
from attnscope.records.teaching.trace import Trace
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import Prompt
from attnscope.studies.teaching.options import TraceOptions
from attnscope.studies.teaching.trace import trace, trace_example, trace_plain


def study(
    spec: str, text: str | None, layer: int | None, options: TraceOptions, loading: LoadOptions, *, loops: bool
) -> Trace:
    """Traces heads of a layer on a text, or the worked example where there is none; in plain loops or by NumPy.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    if text is None:
        if layer or options.target is not None or options.kind is not None:
            raise UsageError("without a text the worked example is traced, which has one layer", "give a TEXT")
        return trace_example(options.token, options.heads, engine="reference" if loops else loading.engine)
    if layer is None or options.heads is None:
        raise UsageError("the trace of a text shows single heads", "give a layer and heads, such as -L 3 -H 1")
    prompt = Prompt(text, target=options.target)
    source = loading.resolve(spec)
    if loops and source.folder is not None and supports(read_config(source)) is None:
        from attnscope.models.own.plain import load_plain

        return trace_plain(load_plain(source, "float64"), prompt, layer, options.heads, token=options.token)
    return trace(
        loading.load(source), prompt, layer, options.heads, token=options.token, kind=options.kind, loops=loops
    )
