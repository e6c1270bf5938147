"""From a model's name and texts to a record of what its heads do for it, and from the record to files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from attnscope.errors import UsageError
from attnscope.models.catalog import read_config
from attnscope.models.model import Model
from attnscope.records.ablation import Ablation
from attnscope.studies.ablation import MODES, AblateOptions, ablate
from attnscope.studies.ablation_reading import EACH
from attnscope.studies.ablation_sweep import Mode
from attnscope.studies.inputs import LoadOptions, TextsWanted, named_choices, named_formats, require_writable
from attnscope.studies.interrupted import settle
from attnscope.studies.texts import Report
from attnscope.views.figures import FIGURE_FORMATS

FORMATS = (*FIGURE_FORMATS, "npz", "csv", "json")
USUAL_FORMATS = ("npz", "csv", "png")
RECORD = "ablation"


@dataclass(frozen=True)
class AblateOrder:
    """What the command line asks for; see `attnscope ablate --help`."""

    texts: TextsWanted
    options: AblateOptions
    out: Path | None = None
    formats: str | None = None


def study(spec: str, order: AblateOrder, loading: LoadOptions, report: Report | None) -> tuple[Ablation, list[Path]]:
    """Loads a model, takes its heads out on what was asked for, and writes the files.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    formats = formats_from(order.formats)
    if order.out is None and order.formats is not None:
        raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
    corpus = order.texts.corpus()
    if order.out is not None:
        require_writable(order.out)
    found = ablate(with_head(spec, loading, order.options.loss), corpus, order.options, report)
    found, out = settle(found, order.out, RECORD)
    return found, [] if out is None else write(found, out, formats)


def with_head(spec: str, loading: LoadOptions, loss: str) -> Model:
    """Loads a model with its language-model head, which the native engine leaves out, unless no loss is wanted."""
    source = loading.resolve(spec)
    if loading.engine == "auto" and loss != "none" and source.folder is not None:
        named = read_config(source).get("architectures") or ()
        if any(str(name).endswith("ForMaskedLM") for name in named):
            loading = replace(loading, engine="hf")
    return loading.load(source)


def drawn_again(found: Ablation, out: Path | None, formats: str | None) -> list[Path]:
    """Writes the files of a record that was saved before; `text` is what is printed anyway.

    Raises:
        AttnscopeError: There is no such format, or no folder for it.
    """
    names = named_formats(formats or ("text" if out is None else "png"), (*FORMATS, "text"))
    files = [name for name in names if name != "text"]
    if out is None:
        if files:
            raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
        return []
    require_writable(out)
    return write(found, out, files)


def write(found: Ablation, out: Path, formats: Sequence[str]) -> list[Path]:
    """Writes a record into a folder; each file whole or not at all. What took the time is safe before it is drawn."""
    paths = [found.save(out / f"{RECORD}.{name}") for name in formats if name not in FIGURE_FORMATS]
    figures = [name for name in formats if name in FIGURE_FORMATS]
    if figures and found.heads:
        from attnscope.views.ablation_figures import draw

        paths += draw(found, out, figures)
    return paths


def formats_from(given: str | None) -> tuple[str, ...]:
    """The formats in a list such as `npz,csv,png`; None = the usual ones.

    Raises:
        UsageError: There is no such format.
    """
    return USUAL_FORMATS if given is None else named_formats(given, FORMATS)


def modes_from(given: str) -> tuple[Mode, ...]:
    """The ablations in a list such as `zero,mean`; `none` = no head is taken out.

    Raises:
        UsageError: There is no such ablation.
    """
    names = named_choices(given, (*MODES, "none"), "ablation")
    if "none" in names and len(names) > 1:
        raise UsageError("an ablation is named beside none", "leave out one of them")
    return tuple(mode for mode in MODES if mode in names)


def masked_from(given: str) -> float | Literal["each"]:
    """A share such as 0.15 or 15%, or `each`.

    Raises:
        UsageError: It is neither.
    """
    text = given.strip().lower()
    if text == EACH:
        return EACH
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{given!r} is no share of tokens", "such as 0.15 or 15%, or: each") from None


def by_layer_from(given: str | None) -> bool:
    """Whether importances are divided by their layer's norm: `layer`, or nothing.

    Raises:
        UsageError: It is something else.
    """
    if given not in (None, "layer"):
        raise UsageError(f"importance is not normalised by {given!r}", "there is: layer")
    return given is not None
