"""Describe the origin of a record: the model, its weights, versions."""

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from attnscope.models.info import ModelInfo
from attnscope.version import VERSION

_HEAVY = ("torch", "transformers")
"""What the numpy engine does without."""


_OF_MODEL = (
    "name",
    "source",
    "sha256",
    "architecture",
    "engine",
    "path",
    "dtype",
    "device",
    "checked",
    "n_parameters",
)
_CALLED = {"name": "model", "path": "road"}
"""The facts of a model that a record keeps, and what it calls some of them."""


def run_of(info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return what made a record, as plain JSON values."""
    run = {_CALLED.get(name, name): getattr(info, name) for name in _OF_MODEL}
    # By kind of attention.
    for name in ("n_layers", "n_heads", "n_kv_heads"):
        run[name] = dict(zip(info.kinds, getattr(info, name), strict=True))
    # The versions that made the numbers.
    known = dict(versions())
    if info.engine == "numpy":
        known = {name: number for name, number in known.items() if name not in _HEAVY}
    run |= {"seed": None, "versions": known, "notes": [*info.notes, *notes]}
    if info.adapter:
        run |= {"adapter": info.adapter, "adapter_sha256": info.adapter_sha256}
    return run


def run_of_example(notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return what made a record of the worked example, which reads no model."""
    known = dict(versions())
    return {
        "model": "worked example",
        "engine": "native",
        "dtype": "float64",
        "device": "cpu",
        "sha256": "",
        "seed": None,
        "versions": {name: known[name] for name in ("attnscope", "python", "numpy")},
        "notes": list(notes),
    }


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """Return the versions that numbers depend on, by name."""
    return (
        ("attnscope", VERSION),
        ("python", platform.python_version()),
        *((name, version(name)) for name in ("torch", "transformers", "tokenizers", "numpy")),
    )
