"""A model that runs on the descriptions of its heads, for whatever evaluation: `attnscope.replaced`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.studies.ablation.lines import Lines
from attnscope.studies.ablation.means import means_of
from attnscope.studies.ablation.options import REPLACED, Mode
from attnscope.studies.ablation.reading import PaddedTexts, Reader
from attnscope.studies.ablation.sweep import Cut, Going, StandIns, replaced_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attnscope.core.attention.seam import Probe
    from attnscope.records import Tokens


@contextmanager
def replaced(
    model: Model, lines: Lines, heads: Sequence[tuple[int, int]] | None = None, by: Mode = "line"
) -> Iterator[Any]:
    """A context in which heads of a model attend to what their descriptions expect; the values stay the model's own.

        lines = attnscope.fit_lines(model, attnscope.Corpus("corpus.txt"))
        with attnscope.replaced(model, lines) as network:
            loss = network(input_ids=ids, labels=ids).loss

    It changes every forward pass of the torch module, whoever calls it. The module runs in evaluation mode, and its
    parameters get no gradient. Studies of attnscope refuse the model within the context.

    Args:
        model: A loaded transformers model, see `attnscope.load`; also a module in memory that was loaded.
        lines: The descriptions, see `attnscope.fit_lines`.
        heads: (layer, head) of the heads that are replaced; None = all.
        by: What takes the place of their weights: "line", "pattern" (the mean of their weights by offset, over the
            texts that the lines were fitted on), "uniform", "sink" (the first token) or "other" (the line of the next
            head of the layer).

    Yields:
        The torch module, with the model's head.

    Raises:
        AttnscopeError: The model is no transformers model; or, in a forward pass, the module is given no `input_ids`,
            or single tokens that continue cached ones.
        UsageError: There is no such head, or nothing else of that name.
    """
    if by not in REPLACED:
        raise UsageError(f"weights cannot be replaced by {by!r}", f"choose from {', '.join(REPLACED)}")
    if model.probe_forwards is None:
        raise AttnscopeError(
            f"{model.info.name} is run by the {model.info.engine} engine, which has no module to evaluate",
            'load it with engine="hf"',
        )
    described_heads = [(described.kind, described.layer, described.head) for described in lines.expectations.heads]
    for head in heads or ():
        if head not in [described_head[1:] for described_head in described_heads]:
            raise UsageError(f"there is no line for L{head[0]}H{head[1]}", "choose heads that were described")
    stand_ins = StandIns({}, lines=lines)
    if by == "pattern":
        stand_ins = replace(
            stand_ins, patterns=means_of(Going(model, Reader(model, None), lines.texts), patterns=True)[0].means
        )
    cut = Cut(
        tuple(described_head for described_head in described_heads if heads is None or described_head[1:] in heads), by
    )

    def probe_of(tokens: Sequence[Tokens], real: NDArray[Any]) -> Probe:
        return replaced_of([cut], by, PaddedTexts(tuple(tokens), real), stand_ins)

    with model.probe_forwards(probe_of) as network:
        yield network
