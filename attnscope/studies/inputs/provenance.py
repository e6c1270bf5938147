"""Make the `run` of a record, which says what made it: the model, its weights, and the versions of libraries."""

import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Any

from attnscope.models.info import ModelInfo
from attnscope.version import VERSION

_UNUSED_BY_NUMPY = ("torch", "transformers")
"""Libraries that the engine "numpy" does without."""

_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""The libraries whose versions numbers depend on."""

_FACTS = (
    "source",
    "sha256",
    "architecture",
    "engine",
    "road",
    "dtype",
    "device",
    "checked",
    "n_parameters",
)
"""The facts of a model that a record keeps beside its name, see `ModelInfo.as_json`."""


def run_of(info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the `run` of a record, as plain JSON values.

    Its notes are those of the model, then `notes`. Its seed is None: a study that draws at random sets it.
    """
    facts = info.as_json()
    run = {"model": info.name} | {name: facts[name] for name in _FACTS}
    # These fields have one number for each kind of attention.
    for name in ("n_layers", "n_heads", "n_kv_heads"):
        run[name] = dict(zip(info.kinds, getattr(info, name), strict=True))
    used_versions = versions()
    if info.engine == "numpy":
        used_versions = {
            name: number for name, number in used_versions.items() if name not in _UNUSED_BY_NUMPY
        }
    run |= {"seed": None, "versions": used_versions, "notes": [*info.notes, *notes]}
    # Only records of adapted models name an adapter.
    if info.adapter:
        run |= {"adapter": info.adapter, "adapter_sha256": info.adapter_sha256}
    return run


def run_of_example() -> dict[str, Any]:
    """Return the `run` of a record of the worked example, which has no model."""
    return {
        "model": "worked example",
        "engine": "native",
        "dtype": "float64",
        "device": "cpu",
        "sha256": "",
        "seed": None,
        "versions": {name: versions()[name] for name in ("attnscope", "python", "numpy")},
        "notes": [],
    }


@cache
def versions() -> dict[str, str]:
    """Return the versions that numbers depend on, by name: attnscope's, Python's and those of `_LIBRARIES`."""
    own = {"attnscope": VERSION, "python": platform.python_version()}
    return own | {name: version(name) for name in _LIBRARIES}
