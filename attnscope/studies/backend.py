"""Which back end measures heads: chosen once a run, by what is there and by how much there is to do.

torch measures on every device in every precision. numba's one fused pass takes less time, in float32 on the CPU;
but it has to be loaded, and before that compiled once, which only pays where there is enough to measure.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.errors import AttnscopeError, UsageError

if TYPE_CHECKING:
    from attnscope.core.measures.backends import Backend
    from attnscope.models.model import ModelInfo

VARIABLE = "ATTNSCOPE_BACKEND"
"""The variable of the environment that names a back end."""

LOAD_FROM = 2e8
"""Attention weights from which on loading the compiled pass pays: half a second; each weight spares 3 to 6 ns."""

COMPILE_FROM = 2e9
"""Attention weights from which on compiling it pays: 3 to 10 seconds, once on a machine."""


def choose_backend(info: ModelInfo, n_weights: float) -> Backend:
    """What is to measure all texts of a run, whatever they are cut into.

    Args:
        info: The model.
        n_weights: About how many attention weights there will be, of all texts, layers and heads.

    Raises:
        AttnscopeError: The environment names a back end that is not there, or cannot measure this model.
    """
    named, hindrance = _named(), _hindrance(info)
    if named == "numba":
        if hindrance:
            raise AttnscopeError(f"{VARIABLE} is numba, but {hindrance}", f"leave out {VARIABLE}, or let it be torch")
        return "numba"
    if named == "torch" or hindrance:
        return "torch"
    return "numba" if n_weights >= (LOAD_FROM if is_compiled() else COMPILE_FROM) else "torch"


def require_backend(backend: Backend) -> None:
    """Makes a back end ready; numba's is loaded, and compiled where it has not been.

    Raises:
        AttnscopeError: It is not here, as may be on a worker's machine.
    """
    if backend == "numba":
        try:
            from attnscope.core.measures import numba_pass  # noqa: F401
        except ImportError as error:
            raise AttnscopeError(
                f"numba cannot be loaded here: {error}", f"install attnscope[fast], or let {VARIABLE} be torch"
            ) from None


def _named() -> str:
    """The back end that the environment names; "" = none.

    Raises:
        UsageError: There is no such back end.
    """
    named = os.environ.get(VARIABLE, "")
    if named not in ("", "torch", "numba"):
        raise UsageError(f"there is no back end {named!r}", f"let {VARIABLE} be torch or numba, or leave it out")
    return named


def tell_backend(info: ModelInfo) -> str:
    """Which back end measures heads of a model, and why, for people."""
    if info.engine == "numpy":
        return "none: this engine looks at single texts"
    named, hindrance = _named(), _hindrance(info)
    if named:
        return f"{named}, as {VARIABLE} says"
    if hindrance:
        return f"torch ({hindrance})"
    least, state = (LOAD_FROM, "compiled") if is_compiled() else (COMPILE_FROM, "not compiled yet")
    return f"numba from {least / 1e6:,.0f} million attention weights on ({state}), else torch"


def _hindrance(info: ModelInfo) -> str:
    """Why numba cannot measure a model; "" if it can."""
    if info.path == "eager":
        return "the model's dense weights are measured"
    if info.device != "cpu":
        return f"the model is on {info.device}"
    if info.dtype == "float64":
        return "the model is in float64"
    return "" if importlib.util.find_spec("numba") else "numba is not installed: attnscope[fast]"


def is_compiled() -> bool:
    """Whether the fused pass lies compiled on this machine; numba is not loaded to ask."""
    source = Path(__file__).parents[1] / "core" / "measures" / "numba_kernel.py"
    given = os.environ.get("NUMBA_CACHE_DIR")
    cache = Path(given) if given else Path.home() / ".cache" / "numba"
    folders = [source.parent / "__pycache__", *(path.parent for path in cache.glob(f"*{source.parent.name}*/"))]
    found = [path for folder in {*folders, cache} for path in folder.glob(f"**/{source.stem}.read_rows-*.nbi")]
    return any(path.stat().st_mtime >= source.stat().st_mtime for path in found)
