"""Which back end measures heads: chosen once a run, by what is there and by how much there is to do.

torch measures on every device in every precision. One fused pass, numba's on the processor and triton's on a CUDA
device, takes less time; but it has to be loaded, and before that compiled once, which only pays where there is enough
to measure.
"""

from __future__ import annotations

import importlib.util
import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from attnscope.errors import AttnscopeError, UsageError

if TYPE_CHECKING:
    from attnscope.core.measures.backends.choose import Backend
    from attnscope.models.info import ModelInfo

VARIABLE = "ATTNSCOPE_BACKEND"
"""The variable of the environment that names a back end."""

LOAD_FROM = 2e8
"""Attention weights from which on loading the compiled pass pays: half a second; each weight spares 3 to 6 ns."""

COMPILE_FROM = 4e9
"""Attention weights from which on compiling it pays: 3 to 10 seconds, once on a machine. Threads share the weights and
not the compiling; how many there are is not asked, for a record is to be the same whatever their number."""

DEVICE_FROM = 1e11
"""Attention weights from which on triton's pass pays on a CUDA device, or so we think: compiling and trying it takes 10
to 30 seconds, once on a machine, and what it spares there is not measured."""

_TOLERANCE = 0.02
"""How far triton may be from torch on the text on which it is tried, relative to each measure's largest sum: what half
precision does to queries and keys is the same for both."""


def choose_backend(info: ModelInfo, n_weights: float) -> Backend:
    """What is to measure all texts of a run, whatever they are cut into.

    `n_weights` is about how many attention weights all texts, layers and heads have.

    Raises:
        AttnscopeError: The environment names a back end that is not there, or cannot measure this model.
    """
    named = _named()
    if named:
        if named != "torch" and (hindrance := _hindrance(info, named)):
            raise AttnscopeError(f"{VARIABLE} is {named}, but {hindrance}", f"leave out {VARIABLE}, or let it be torch")
        return named
    if _is_on_cuda(info):
        large = n_weights >= DEVICE_FROM and not _hindrance(info, "triton")
        return "triton" if large and agrees_with_torch(info) else "torch"
    if _hindrance(info, "numba"):
        return "torch"
    return "numba" if n_weights >= (LOAD_FROM if is_compiled() else COMPILE_FROM) else "torch"


def require_backend(backend: Backend) -> None:
    """Makes a back end ready: it is loaded, and numba's compiled where it has not been.

    Raises:
        AttnscopeError: It is not here, as may be on a worker's machine.
    """
    if backend == "torch":
        return
    try:
        import_module(f"attnscope.core.measures.backends.{backend}_pass")
    except ImportError as error:
        raise AttnscopeError(
            f"{backend} cannot be loaded here: {error}", f"install {_SOURCES[backend]}, or let {VARIABLE} be torch"
        ) from None


def agrees_with_torch(info: ModelInfo) -> bool:
    """Whether triton measures a small text on the model's device as torch does.

    It needs a C compiler there, and a device that it knows; and a wrong number is worse than a slow one.
    """
    import torch

    from attnscope.core.attention.seam import AttentionCall
    from attnscope.core.measures.facts import TextFacts
    from attnscope.core.measures.sums import Sums

    n, chance = 70, torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, n, 64, generator=chance).to(info.device, getattr(torch, info.dtype))
    call = AttentionCall(0, "decoder", query, key, value, 0.25, is_causal=True)
    ids = torch.randint(0, 9, (2, n), generator=chance)
    vectors = torch.nn.functional.normalize(torch.randn(9, 5, generator=chance), dim=-1)[ids]
    facts = TextFacts(torch.ones(2, n, dtype=torch.bool), ids == n, ids, embeddings=vectors, rarest=ids == 3)
    results = []
    both: tuple[Backend, ...] = "torch", "triton"
    try:
        for backend in both:
            probe = Sums(facts, backend=backend)
            output = probe(call).float()
            results.append((output, torch.from_numpy(probe.sums["decoder"][0].sum)))
    except Exception:  # whatever its compiler, its driver or the C compiler has to say
        return False
    return all(
        bool(((ours - theirs).abs().amax((-2, -1)) <= _TOLERANCE * theirs.abs().amax((-2, -1)) + 1e-3).all())
        for theirs, ours in zip(*results, strict=True)
    )


_DEVICES: dict[Backend, str] = {"numba": "cpu", "triton": "cuda"}
_SOURCES: dict[Backend, str] = {"numba": "attnscope[fast]", "triton": "triton"}
"""What each compiled pass is for, and what brings it."""


def _named() -> Backend | None:
    """The back end that the environment names; None = none.

    Raises:
        UsageError: There is no such back end.
    """
    named = os.environ.get(VARIABLE, "")
    names: tuple[Backend, ...] = ("torch", "numba", "triton")
    for backend in names:
        if named == backend:
            return backend
    if named:
        raise UsageError(
            f"there is no back end {named!r}", f"let {VARIABLE} be torch, numba or triton, or leave it out"
        )
    return None


def tell_backend(info: ModelInfo) -> str:
    """Which back end measures heads of a model, and why, for people."""
    if info.engine == "numpy":
        return "none: this engine looks at single texts"
    if named := _named():
        return f"{named}, as {VARIABLE} says"
    if _is_on_cuda(info) and not _hindrance(info, "triton"):
        return f"triton from {_count(DEVICE_FROM)} attention weights on, else torch"
    if hindrance := _hindrance(info, "triton" if _is_on_cuda(info) else "numba"):
        return f"torch ({hindrance})"
    least, state = (LOAD_FROM, "compiled") if is_compiled() else (COMPILE_FROM, "not compiled yet")
    return f"numba from {_count(least)} attention weights on ({state}), else torch"


def _count(weights: float) -> str:
    """A round number in words, such as 4 billion."""
    return f"{weights / 1e9:g} billion" if weights >= 1e9 else f"{weights / 1e6:g} million"


def _is_on_cuda(info: ModelInfo) -> bool:
    return info.device.startswith("cuda")


def _hindrance(info: ModelInfo, backend: Backend) -> str:
    """Why a compiled pass cannot measure a model; "" if it can."""
    if info.path == "eager":
        return "the model's dense weights are measured"
    if info.device.partition(":")[0] != _DEVICES[backend]:
        return f"the model is on {info.device}"
    if info.dtype == "float64":
        return "the model is in float64"
    return "" if importlib.util.find_spec(backend) else f"{backend} is not installed: {_SOURCES[backend]}"


def is_compiled() -> bool:
    """Whether the fused pass lies compiled on this machine; numba is not loaded to ask."""
    source = Path(__file__).parents[2] / "core" / "measures" / "backends" / "numba_kernel.py"
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    cache = Path(chosen) if chosen else Path.home() / ".cache" / "numba"
    try:
        folders = [source.parent / "__pycache__", *(path.parent for path in cache.glob(f"*{source.parent.name}*/"))]
        indexes = [path for folder in {*folders, cache} for path in folder.glob(f"**/{source.stem}.read_rows-*.nbi")]
        return any(path.stat().st_mtime >= source.stat().st_mtime for path in indexes)
    except OSError:  # the home folder of another user, as sudo leaves it
        return False
