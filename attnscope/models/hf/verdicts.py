"""Remember how checks ended: what was compared with eager attention once is not compared at every load.

There is one small JSON file per model from files, in the user's cache folder. Its name is a hash of all that a verdict
depends on, and it holds a checksum. A file that is damaged in any way is no verdict: the check runs. How models are
compared is the business of `hf.check`. Models in memory have no `Identity` and are never remembered.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import platform
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attnscope.errors import AttnscopeError, is_out_of_memory, parse_json
from attnscope.models.catalog import ADAPTER
from attnscope.models.hf.seam import implementation_for
from attnscope.models.hf.survey import Survey, Unclear
from attnscope.results.storage import write_whole

MOST_BYTES = 256 * 1024
"""The largest file that is read or written; a model of 100 layers takes about 10 KiB."""

PACKAGE = Path(__file__).parents[2]
"""The folder of attnscope's own code."""

_PACKAGES = (
    *("attnscope", "torch", "transformers", "numpy", "safetensors", "accelerate", "peft", "timm", "torchvision"),
    *("torchaudio", "kernels", "flash-attn", "flash-linear-attention", "mamba-ssm", "causal-conv1d"),
)
"""Packages that may compute part of a model, if they are installed."""

_OF_TORCH = {"builtins", "torch", "typing", "collections", "abc"}
"""Packages whose code need not be hashed: the versions of Python and torch stand for it."""

_FIELDS = ("path", "layers", "n_layers", "n_heads", "n_kv_heads", "d_model", "extras", "notes", "reaches")
"""Fields of a survey that are stored, beside its plan."""


@dataclass(frozen=True)
class Identity:
    """Hashes that tell the files of a model from those of any other."""

    facts: Mapping[str, str]  # what the files hash to, by name
    again: bool = False  # whether to compare, whatever is remembered


def identify(folder: Path, sha256: str, adapter: Path | None, *, again: bool) -> Identity | None:
    """Return the identity of a model in a folder, whose weights and adapter hash to `sha256`; None without one."""
    try:
        config = _sha256((folder / "config.json").read_bytes())
        # The adapter's hash is of its weights alone; its configuration scales them.
        scales = "" if adapter is None else _sha256((adapter / ADAPTER).read_bytes())
    except OSError:
        return None
    return Identity({"weights": sha256, "config": config, "adapter": scales}, again)


class Memory:
    """The stored verdict on one model from files, or on one part of it.

    Args:
        model: The model, with its head if it has one.
        base: The part of it that is compared.
        identity: What its files are.
    """

    def __init__(self, model: PreTrainedModel, base: PreTrainedModel, identity: Identity) -> None:
        self._base = base
        key = _key_of(model, base, identity)
        folder = None if key is None else cache_folder()
        self._path = None if folder is None else folder / f"{key}.json"
        self._verdict: dict[str, Any] = {} if identity.again else self._read()

    def survey(self, compute: Callable[[], Survey]) -> Survey:
        """Return the remembered survey of the model's attention, else the one that `compute` returns.

        Raises:
            AttnscopeError: The model cannot be shown truly: now, or when it was compared.
        """
        # A verdict may be a refusal, or a survey; else the check runs now.
        verdict = self._verdict
        when = f"{verdict.get('date')} with torch {verdict.get('torch')}"
        if "failure" in verdict:
            message, hint = verdict["failure"]
            raise AttnscopeError(message, f"{hint}{'; ' * bool(hint)}this was found on {when}: --check tries again")
        if "survey" in verdict:
            return replace(self._decode(verdict["survey"]), remembered=when)
        try:
            survey = compute()
        except AttnscopeError as error:
            if is_lasting(error):
                self._write({"failure": [error.message, error.hint]})
            raise
        # Memory that was short then may suffice the next time.
        if survey.checked and not any(_speaks_of_memory(note) for note in survey.notes):
            self._write({"survey": self._encode(survey)})
        return survey

    @property
    def resumes(self) -> bool:
        """Return whether the verdict says that a run may go on at a layer; False = not known."""
        return bool(self._verdict.get("resumes"))

    def remember_resumes(self) -> None:
        """Add to the verdict that a run may go on at a layer."""
        if "survey" in self._verdict:
            self._write({**self._verdict, "resumes": True})

    def _encode(self, survey: Survey) -> dict[str, Any]:
        """Return a survey as JSON values, its modules by their names."""
        names = {module: name for name, module in self._base.named_modules()}
        plan = [(names[module], list(places)) for module, places in survey.plan.items()]
        return {"plan": plan, **{name: getattr(survey, name) for name in _FIELDS}}

    def _decode(self, encoded: Mapping[str, Any]) -> Survey:
        modules = dict(self._base.named_modules())
        facts = {name: encoded[name] for name in _FIELDS}
        facts["layers"] = {kind: tuple(numbers) for kind, numbers in encoded["layers"].items()}
        facts["notes"] = tuple(encoded["notes"])
        plan = {modules[name]: [(kind, layer) for kind, layer in places] for name, places in encoded["plan"]}
        return Survey(**facts, plan=plan)

    def _read(self) -> dict[str, Any]:
        """Return the verdict that the file holds; {} if there is none, or it is damaged."""
        if self._path is None:
            return {}
        try:
            # A link is not followed, nor a pipe waited for.
            status = self._path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
                return {}
            document = parse_json(self._path.read_bytes())
            verdict: dict[str, Any] = document["verdict"]
            return verdict if document["sha256"] == self._checksum(verdict) else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def _write(self, verdict: Mapping[str, Any]) -> None:
        """Write a verdict where that is possible; where it is not, nothing is remembered."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        self._verdict = {**verdict, "date": today, "torch": torch.__version__}
        # The checksum covers the file's name too: a file under another name is no verdict.
        content = json.dumps({"sha256": self._checksum(self._verdict), "verdict": self._verdict}).encode()
        if self._path is not None and len(content) <= MOST_BYTES:
            with contextlib.suppress(AttnscopeError, OSError):
                write_whole(self._path, content)

    def _checksum(self, verdict: Any) -> str:
        name = "" if self._path is None else self._path.name
        return _sha256(f"{name} {json.dumps(verdict, sort_keys=True)}".encode())


def cache_folder() -> Path | None:
    """Return the folder of verdicts; None if there is no home."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # As the specification has it, a relative path is as good as none.
        cache = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "attnscope" / "checks"


# What a verdict depends on ----------------------------------------------------------------------------------------


def _key_of(model: PreTrainedModel, base: PreTrainedModel, identity: Identity) -> str | None:
    """Return a hash over all that a verdict depends on; None if part of it is unknown, such as where code lies."""
    code = _hash_files(sources_of(model))
    own_code = _hash_files(tuple(sorted(PACKAGE.rglob("*.py"))))
    if code is None or own_code is None:
        return None
    # Everything that may change the numbers: files, code, packages, shapes, kernels and machine.
    tensors = itertools.chain(base.named_parameters(), base.named_buffers())
    facts = {
        **identity.facts,
        "attnscope": own_code,
        "code": code,
        "packages": versions(),
        "model": [f"{kind.__module__}.{kind.__qualname__}" for kind in (type(model), type(base))],
        "attention": [implementation_for(base), str(base.config._attn_implementation)],
        "tensors": [(name, list(x.shape), str(x.dtype), x.device.type) for name, x in tensors],
        "machine": _machine(base.device),
    }
    return _sha256(json.dumps(facts, sort_keys=True).encode())


def sources_of(model: PreTrainedModel) -> tuple[Path, ...]:
    """Return the files with the code of a model's parts, sorted; none if one of them has no file.

    Code that came with the model may import what lies beside it, so all of that counts.
    """
    files: set[Path] = set()
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    for name in {kind.__module__ for kind in kinds}:
        package = name.partition(".")[0]
        if package in _OF_TORCH:
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return ()
        files |= set(Path(file).parent.rglob("*.py")) if package == "transformers_modules" else {Path(file)}
    return tuple(sorted(files))


@functools.cache
def _hash_files(files: tuple[Path, ...]) -> str | None:
    """Return the hash of files with their names; None if there are none, or one cannot be read."""
    digest = hashlib.sha256()
    try:
        for path in files:
            digest.update(f"{path.name} {_sha256(path.read_bytes())}\n".encode())
    except OSError:
        return None
    return digest.hexdigest() if files else None


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python, and of the packages that may compute part of a model."""
    known = {"python": platform.python_version(), "torch itself": torch.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            known[name] = importlib.metadata.version(name)
    return known


def _machine(device: torch.device) -> list[str]:
    """Return the device's facts: kernels differ between processors, and machines may share a home folder."""
    precise = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        return ["cuda", torch.cuda.get_device_name(device), precise, str(torch.version.cuda)]
    return [device.type, platform.system(), platform.machine(), torch.backends.cpu.get_cpu_capability(), precise]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def is_lasting(error: BaseException) -> bool:
    """Return whether a failure is a property of the model, not an error of other code or a lack of memory."""
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:
        if not isinstance(cause, AttnscopeError | Unclear) or _speaks_of_memory(str(cause)):
            return False
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return True


def _speaks_of_memory(text: str) -> bool:
    return is_out_of_memory(RuntimeError(text))
