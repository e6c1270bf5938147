"""What `attnscope ablate` and its Python functions are asked with. Loads nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from attnscope.choice import Choice
from attnscope.errors import UsageError
from attnscope.options import group, kind_option, option, options, read_names, seed_option, target_option

Mode = Literal["zero", "mean", "resample"]
MODES: tuple[Mode, ...] = ("zero", "mean", "resample")
"""What takes the place of a head's output: nothing, the mean of its outputs over all tokens, or outputs elsewhere."""

EACH: Literal["each"] = "each"


def _modes(listed: str) -> tuple[Mode, ...]:
    names = read_names(listed, (*MODES, "none"), "ablation")
    if "none" in names and len(names) > 1:
        raise UsageError("an ablation is named beside none", "leave out one of them")
    return tuple(mode for mode in MODES if mode in names)


def _share(written: str) -> float | Literal["each"]:
    share = written.strip().lower()
    if share == EACH:
        return EACH
    try:
        return float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
    except ValueError:
        raise UsageError(
            f"--masked is {written!r}", "give a share of the tokens, such as 0.15 or 15%, or: each"
        ) from None


@options
class AblateOptions:
    """What is taken out, and what is looked at."""

    modes: tuple[Mode, ...] = option(
        "What replaces a head's output: zero, mean (of its outputs over all tokens), or resample (its outputs on 8 "
        "other texts, one after the other). none: replace no head.",
        "--ablation", default=("zero", "mean"), choices=MODES, read=_modes, written="zero,mean",
    )  # fmt: skip
    importance: bool = option(
        "Also estimate each head's importance by one backward pass: E |dL/dξ| (Michel et al. 2019).", default=False
    )
    by_layer: bool = option(
        "Divide each importance by the norm of its layer's importances.", default=False, python_only=True
    )
    choice: Choice = group(Choice)
    kind: str | None = kind_option()
    loss: str = option(
        "What the loss is computed on: causal, masked, target, none; auto: what the model's head predicts.",
        default="auto", choices=("auto", "causal", "masked", "target", "none"),
    )  # fmt: skip
    masked: float | Literal["each"] = option(
        "Share of tokens that a masked model has to fill in; each: every token in turn.",
        default=0.15, read=_share, written="15%", rare=True,
    )  # fmt: skip
    target: str | None = target_option()
    save: Path | None = option(
        "Write the model without the heads of --pick into this new folder.", default=None, panel="Output"
    )
    seed: int = seed_option("masked tokens and random directions")

    def require(self) -> None:
        """Refuses a share that is not one, and an order to do nothing."""
        if self.masked != EACH and not 0 < float(self.masked) < 1:
            raise UsageError(f"--masked is {self.masked}", "it is a share of the tokens between 0 and 1, or: each")
        if not (self.modes or self.importance):
            raise UsageError("nothing is to be done", "add --importance, or name an ablation")
