"""`attnscope ablate`."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnscope.cli import groups, options
from attnscope.errors import UsageError

if TYPE_CHECKING:
    from attnscope.studies.ablation.sweep import Mode


@groups.command(omit=("scale", "cmap"), pick="Single heads, such as L3H1,L5H11: each, and all together.")
def ablate(
    *,
    texts: groups.Texts,
    target: Annotated[
        str | None,
        "What an encoder-decoder is to write.  [default: its own answer to each text]",
        "Text",
    ] = None,
    model: groups.Model = "minilm",
    which: groups.Heads,
    kind: groups.Kind = None,
    ablation: Annotated[
        str, "What is put in a head's place: zero, mean (of its outputs), or both; none: no sweep."
    ] = "zero,mean",
    loss: Annotated[
        str, "What is predicted: causal, masked, target, none; auto: what the model's head predicts."
    ] = "auto",
    masked: Annotated[str, "The share of tokens that a masked model has to fill in; each: every one in turn."] = "15%",
    importance: Annotated[bool, "Also E |dL/dξ| of each head, by one backward pass (Michel et al.)."] = False,
    normalize: Annotated[str | None, "layer: divide importances by the norm of those of their layer."] = None,
    curve: Annotated[bool, "Take heads out one after another: by importance, by effect, at random."] = False,
    joint: Annotated[bool, "Pairs of the picked heads, else of the 8 without which most changes."] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of masked tokens, random orders and directions.")] = 0,
    where: groups.Where,
    drawing: groups.Drawing,
    running: groups.Running,
    loading: groups.Loading,
    printing: groups.Printing,
) -> None:
    """Say what each head does for the model: take it out, and measure what changes.

    - `attnscope ablate --file sample_texts/sentences.txt`
    - `attnscope ablate "The cat sat." --pick L3H1,L5H5 --joint`
    - `attnscope ablate --file corpus.txt -m ./SmolLM2-135M --importance --curve -o out`
    """
    from attnscope.studies.ablation.study import AblateOptions
    from attnscope.studies.ablation.study import ablate as study

    wanted = AblateOptions(
        modes=_modes(ablation), importance=importance, by_layer=_by_layer(normalize), curve=curve, joint=joint,
        choice=which.choice(), kind=kind, loss=loss, masked=_masked(masked), target=target, seed=seed,
    )  # fmt: skip
    output = where.plan("ablate", printing, **drawing.options())
    corpus, load = texts.wanted().corpus(), loading.options()
    load = load if loss == "none" else load.with_head(model)
    shared = running.share(model, load)
    with options.progress(printing.quiet) as report:
        found = study(load.load(model), corpus, wanted, report, shared)
    output.deliver(found)


def _modes(given: str) -> "tuple[Mode, ...]":
    """The ablations in a list such as `zero,mean`; `none` = no head is taken out.

    Raises:
        UsageError: There is no such ablation.
    """
    from attnscope.output import read_names
    from attnscope.studies.ablation.study import MODES

    names = read_names(given, (*MODES, "none"), "ablation")
    if "none" in names and len(names) > 1:
        raise UsageError("an ablation is named beside none", "leave out one of them")
    return tuple(mode for mode in MODES if mode in names)


def _masked(given: str) -> 'float | Literal["each"]':
    """A share such as 0.15 or 15%, or `each`.

    Raises:
        UsageError: It is neither.
    """
    text = given.strip().lower()
    if text == "each":
        return "each"
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise UsageError(f"{given!r} is no share of tokens", "such as 0.15 or 15%, or: each") from None


def _by_layer(given: str | None) -> bool:
    """Whether importances are divided by their layer's norm: `layer`, or nothing.

    Raises:
        UsageError: It is something else.
    """
    if given not in (None, "layer"):
        raise UsageError(f"importance is not normalised by {given!r}", "there is: layer")
    return given is not None
