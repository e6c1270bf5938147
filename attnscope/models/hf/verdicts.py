"""Remember which models passed their check: what was compared with eager attention once is not compared at every load.

There is one small JSON file per model from files, in the user's cache folder. Its name is a hash of all that a verdict
depends on, and it holds a checksum: a file that is damaged in any way is no verdict, and the check runs. Models in
memory and those that bring their own code are never remembered; nor are failures.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError, parse_json
from attnscope.models.files import file_sha256
from attnscope.models.hf.seam import implementation_for
from attnscope.models.hf.survey import Survey
from attnscope.results.storage import write_whole

PACKAGE = Path(__file__).parents[2]
"""The folder of attnscope's own code."""

_OWN_CODE = ("core/attention", "models/hf")
"""The folders of it that decide what passes the seam."""

_PACKAGES = (
    *("torch", "transformers", "numpy", "safetensors", "peft", "timm", "kernels", "flash-attn"),
    *("flash-linear-attention", "mamba-ssm", "causal-conv1d"),
)
"""Packages that may compute part of a model, if they are installed."""

_FIELDS = ("path", "layers", "n_layers", "n_heads", "n_kv_heads", "d_model", "extras", "notes", "reaches")
"""Fields of a survey that are stored, beside its plan."""


class Memory:
    """The stored verdict on one model from files, or on one part of it.

    Args:
        model: The model, with its head if it has one.
        base: The part of it that is compared.
        hashes: What tells its files from those of any other model, by name.
        again: Whether to compare, whatever is remembered.
    """

    def __init__(
        self, model: PreTrainedModel, base: PreTrainedModel, hashes: Mapping[str, str], *, again: bool
    ) -> None:
        self._base = base
        self._path = _cache_folder() / f"{_key_of(model, base, hashes)}.json"
        self._verdict: dict[str, Any] = {} if again else self._read()

    def survey(self, compute: Callable[[], Survey]) -> Survey:
        """Return the remembered survey of the model's attention, else the one that `compute` returns."""
        if self._verdict:
            modules = dict(self._base.named_modules())
            facts = {name: self._verdict[name] for name in _FIELDS}
            facts["layers"] = {kind: tuple(numbers) for kind, numbers in facts["layers"].items()}
            facts["notes"] = tuple(facts["notes"])
            plan = {}
            for name, places in self._verdict["plan"]:
                plan[modules[name]] = [(kind, layer) for kind, layer in places]
            return Survey(**facts, plan=plan, remembered=self._verdict["when"])
        survey = compute()
        if survey.checked:
            names = {module: name for name, module in self._base.named_modules()}
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            self._verdict = {name: getattr(survey, name) for name in _FIELDS}
            self._verdict["plan"] = [(names[module], list(places)) for module, places in survey.plan.items()]
            self._verdict["when"] = f"{today} with torch {torch.__version__}"
            self._write()
        return survey

    @property
    def resumes(self) -> bool:
        """Return whether the verdict says that a run may go on at a layer; False = not known."""
        return bool(self._verdict.get("resumes"))

    def remember_resumes(self) -> None:
        """Add to the verdict that a run may go on at a layer."""
        if self._verdict:
            self._verdict["resumes"] = True
            self._write()

    def _read(self) -> dict[str, Any]:
        """Return the verdict that the file holds; {} if there is none, or it is damaged."""
        try:
            document = parse_json(self._path.read_bytes())
            verdict: dict[str, Any] = document["verdict"]
            return verdict if document["sha256"] == self._checksum(verdict) else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _write(self) -> None:
        """Write the verdict where that is possible; where it is not, nothing is remembered."""
        content = json.dumps({"sha256": self._checksum(self._verdict), "verdict": self._verdict})
        with contextlib.suppress(AttnscopeError, OSError):
            write_whole(self._path, content.encode())

    def _checksum(self, verdict: Any) -> str:
        # It covers the file's name too: a file under another name is no verdict.
        return _hash([self._path.name, verdict])


def _cache_folder() -> Path:
    """Return the folder of verdicts; one that cannot be where there is no home."""
    # As the specification has it, a relative path is as good as none.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        try:
            cache = Path.home() / ".cache"
        except RuntimeError:
            cache = Path(os.devnull)
    return cache / "attnscope" / "checks"


def _key_of(model: PreTrainedModel, base: PreTrainedModel, hashes: Mapping[str, str]) -> str:
    """Return a hash over all that a verdict depends on: files, code, versions, precision and machine."""
    code: dict[str, str] = {}
    for folder in _OWN_CODE:
        code |= {str(path.relative_to(PACKAGE)): file_sha256(path) for path in (PACKAGE / folder).rglob("*.py")}
    is_cuda = base.device.type == "cuda"
    chip = torch.cuda.get_device_name(base.device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    return _hash(
        {
            "files": dict(hashes),
            "attnscope": code,
            "packages": versions(),
            "model": [f"{kind.__module__}.{kind.__qualname__}" for kind in (type(model), type(base))],
            "attention": [implementation_for(base), str(base.config._attn_implementation)],
            "dtypes": sorted({str(parameter.dtype) for parameter in base.parameters()}),
            "device": [base.device.type, platform.system(), platform.machine(), chip],
            "precision": torch.get_float32_matmul_precision(),
        }
    )


def _hash(facts: Any) -> str:
    """Return the SHA-256 of what JSON can hold, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, and of the packages that may compute part of a model."""
    known = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known
