"""What every view of patching says: what was patched, how large the total effect is, what a reader must know."""

from __future__ import annotations

from attnscope.records.patch import Patching
from attnscope.report.numbers import digits, small_number
from attnscope.report.wording import corpus_notes, printable
from attnscope.views.ablation.summary import interval


def title_of(patching: Patching) -> str:
    """What was patched, such as "denoising: the corrupt run gets the z of the clean run"."""
    by = printable(patching.options.get("by", "z"))
    if patching.options.get("direction") == "noise":
        return f"noising: the clean run gets the {by} of the corrupt run"
    return f"denoising: the corrupt run gets the {by} of the clean run"


def total_line(patching: Patching) -> str:
    """The logit differences of both runs and the total effect."""
    clean, corrupt, total = (patching.whole[name] for name in ("clean", "corrupt", "total"))
    return (
        f"logit difference right − wrong: clean {small_number(clean.value)}, corrupt {small_number(corrupt.value)}; "
        f"total effect {small_number(total.value)} {interval(total)}"
    )


def curve_label(patching: Patching) -> str:
    """What the heads of a curve get, and how they are ordered."""
    return f"{printable(patching.options.get('by', 'z'))}, smallest effect first"


def notes(patching: Patching) -> list[str]:
    """What a reader must know: one sentence each."""
    said = ["effect: how much of the logit difference comes or goes with the head, positive towards the right answers"]
    if patching.shares_heads:
        said.append("heads that share a key/value head are patched together and have one effect")
    agreement = patching.options.get("rank_agreement")
    if isinstance(agreement, float):
        said.append(f"attribution patching ranks heads like exact patching: rank correlation {digits(agreement, 2)}")
    if (n_paths := patching.options.get("n_paths")) and patching.edges:
        agreement = patching.options.get("path_agreement")
        ranks = f": rank correlation {digits(agreement, 2)}" if isinstance(agreement, float) else ""
        said.append(f"the {len(patching.edges):,} of {n_paths:,} paths with the largest estimates were patched{ranks}")
    if patching.options.get("exact") is not None:
        said.append("only the heads that attribution patching puts first were patched: q counts these alone")
    if patching.curve is not None:
        said.append("faithfulness: the order of heads is that of one half of the pairs, measured on the other half")
    if patching.whole["total"].count == 1:
        said.append("one pair gives no interval")
    return said + corpus_notes(patching)
