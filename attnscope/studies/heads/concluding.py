"""From sums to findings. Needs no model and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from attnscope.records.heads.findings import Findings
from attnscope.studies.heads.roles import effective_texts, judge
from attnscope.studies.measuring.tally import Tally, tallies_of

_CONTROL = "control-"
_PREFIXES = ("", _CONTROL)
"""What the names of sums begin with: those of the model itself, and of its control."""

Arrays = Mapping[str, NDArray[Any]]


def sums_of(trained: Mapping[str, Tally], control: Mapping[str, Tally]) -> dict[str, NDArray[Any]]:
    """The state of tallies by kind, as a record holds it."""
    return _sums_under("", trained) | _sums_under(_CONTROL, control)


def conclude(run: Mapping[str, Any], corpus: Mapping[str, Any], options: Mapping[str, Any], sums: Arrays) -> Findings:
    """The findings that sums amount to.

    The thresholds of roles are read from `options`; `sums` are what `sums_of` returned.

    Raises:
        KeyError: A sum or a threshold is missing.
        ValueError: The sums are damaged.
    """
    thresholds = {name: float(role["threshold"]) for name, role in options["roles"].items()}
    n_texts = int(corpus["n_texts"])
    trained, control = (_tallies_under(prefix, sums) for prefix in _PREFIXES)
    effective = max(map(effective_texts, trained.values()), default=0.0)
    return Findings(
        run=run,
        corpus={**corpus, "effective_texts": effective},
        options=options,
        heads=judge(list(trained.values()), thresholds, n_texts),
        sums=sums,
        control=judge(list(control.values()), thresholds, n_texts),
    )


def _sums_under(prefix: str, tallies: Mapping[str, Tally]) -> dict[str, NDArray[Any]]:
    """The state of tallies by kind, with a prefix before each name."""
    return {prefix + name: array for tally in tallies.values() for name, array in tally.to_arrays().items()}


def _tallies_under(prefix: str, sums: Arrays) -> dict[str, Tally]:
    """The tallies that `_sums_under` wrote, by kind."""
    arrays = {}
    for name, array in sums.items():
        own = next((other for other in _PREFIXES if other and name.startswith(other)), "")
        if own == prefix:
            arrays[name.removeprefix(prefix)] = array
    return tallies_of(arrays)
