"""An ablation as figures: a map of layers x heads for each quantity; PNG, SVG and PDF files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attnscope.drawing.canvas import Drawing
from attnscope.drawing.head_maps import measure_page, scale_of
from attnscope.drawing.lettering import Lettering, lettering_for
from attnscope.drawing.page import Page
from attnscope.drawing.style import USUAL, Style
from attnscope.errors import AttnscopeError
from attnscope.records.ablation import Ablation
from attnscope.records.heads.findings import Estimate, Findings, Head
from attnscope.report.numbers import small_number
from attnscope.report.wording import corpus_line, model_of, printable
from attnscope.views.ablation.summary import label, notes, predicted_line


def pages(ablation: Ablation, style: Style = USUAL) -> Iterator[tuple[str, Drawing]]:
    """The figures one after the other, each with its file name without the ending.

    `effect-NAME` has a map of each quantity with numbers, the main one first.

    Raises:
        AttnscopeError: There are no heads.
    """
    if not ablation.heads:
        raise AttnscopeError("this ablation is of no heads", "so there is nothing to draw")
    lettering = lettering_for(_texts(ablation), style.paper)
    names = sorted(ablation.names, key=lambda name: name != ablation.main)
    for name, page in zip(names, effect_maps(ablation, names, lettering), strict=True):
        # A name from a record must not lead out of the folder.
        stem = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:80]
        yield f"effect-{stem}", page


def effect_maps(ablation: Ablation, names: Sequence[str], lettering: Lettering) -> Iterator[Page]:
    """A map of layers x heads for each of these quantities."""
    heads = []
    for head in ablation.heads:
        effects = {
            label(name): Estimate(effect.value, effect.low, effect.high, math.nan, effect.count)
            for name, effect in head.effects.items()
        }
        heads.append(Head(head.kind, head.layer, head.head, roles=(), resting_share=math.nan, measures=effects))
    facts = {label(name): ablation.facts(name) for name in ablation.names}
    measures = {title: {"what": fact.what, "unit": fact.unit} for title, fact in facts.items()}
    findings = Findings(ablation.run, ablation.corpus, {"measures": measures}, tuple(heads))
    for title in map(label, names):
        yield measure_page(findings, title, scale_of(findings, title, small_number), lettering)


def _texts(ablation: Ablation) -> list[str]:
    """All texts of a record that a figure may show, to find fonts for."""
    facts = [ablation.facts(name) for name in ablation.names]
    texts = [text for fact in facts for text in (fact.what, fact.unit)] + list(map(label, ablation.names))
    texts += [model_of(ablation.run), corpus_line(ablation, predictions=True), predicted_line(ablation)]
    texts += [*notes(ablation), *ablation.kinds]
    return [printable(text, 400) for text in texts]
