"""Describe the origin of a record for its `run`: the model, its weights, and the versions of libraries."""

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from attnscope.models.info import ModelInfo
from attnscope.version import VERSION

_NOT_OF_NUMPY = ("torch", "transformers")
"""Libraries that the engine "numpy" does without."""

_FACTS = (
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
_RENAMED = {"name": "model", "path": "road"}
"""The fields of `ModelInfo` that a record keeps, and those that have another name there."""


def run_of(info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the `run` of a record, as plain JSON values: what made it, and notes after the model's own."""
    run = {_RENAMED.get(name, name): getattr(info, name) for name in _FACTS}
    # By kind of attention.
    for name in ("n_layers", "n_heads", "n_kv_heads"):
        run[name] = dict(zip(info.kinds, getattr(info, name), strict=True))
    # The versions that made the numbers.
    known = dict(versions())
    if info.engine == "numpy":
        known = {name: number for name, number in known.items() if name not in _NOT_OF_NUMPY}
    run |= {"seed": None, "versions": known, "notes": [*info.notes, *notes]}
    # Only records of adapted models name an adapter.
    if info.adapter:
        run |= {"adapter": info.adapter, "adapter_sha256": info.adapter_sha256}
    return run


def run_of_example(notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the `run` of a record of the worked example, which has no model."""
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
