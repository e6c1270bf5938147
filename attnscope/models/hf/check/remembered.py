"""The verdicts of earlier checks: what was compared with eager attention once is not compared at every load.

There is one small JSON file per model from files, in the user's cache folder. Its name is a hash of all that a verdict
depends on. A file that cannot be read, or does not hold exactly what is written here, is no verdict: the check runs.
How models are compared is hf.check.survey's business. Models in memory have no `Identity` and are never remembered.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import PreTrainedModel

from attnscope.core.attention.probes import Place
from attnscope.core.attention.seam import Kind
from attnscope.errors import AttnscopeError, is_out_of_memory, parse_json
from attnscope.models.catalog import ADAPTER
from attnscope.models.hf.check.layers import Unclear
from attnscope.models.hf.check.longer import Survey
from attnscope.models.hf.seam import implementation_for
from attnscope.results.storage import write_whole

SCHEMA = "attnscope.check/1"

MOST_BYTES = 256 * 1024
"""The largest file that is read or written; a model of 100 layers takes about 10 KiB."""

MOST_FILES = 1000
"""Verdicts that are kept; beyond these, the oldest go."""

PACKAGE = Path(__file__).parents[3]
"""Where attnscope's own code lies."""

_PACKAGES = (
    *("attnscope", "torch", "transformers", "numpy", "safetensors", "accelerate", "peft", "timm", "torchvision"),
    *("torchaudio", "kernels", "flash-attn", "flash-linear-attention", "mamba-ssm", "causal-conv1d"),
)
"""Packages that may compute part of a model, if they are installed."""

_OF_TORCH = {"builtins", "torch", "typing", "collections", "abc"}
"""Where classes come from whose code the versions of Python and torch stand for."""

_MOST_LAYERS, _LARGEST = 100_000, 2**40
"""No layers or heads are more, and no other number in a verdict is larger."""


@dataclass(frozen=True)
class Identity:
    """What distinguishes the files of a model from those of any other.

    Attributes:
        facts: What the files hash to, by name.
        again: Whether to compare, whatever is remembered.
    """

    facts: Mapping[str, str]
    again: bool = False


def identify(folder: Path, sha256: str, adapter: Path | None, *, again: bool) -> Identity | None:
    """Return the identity of a model in a folder, whose weights and adapter hash to `sha256`; None without one."""
    facts = {"weights": sha256}
    try:
        facts["config"] = _sha256((folder / "config.json").read_bytes())
        # The adapter's hash is of its weights alone; its configuration scales them.
        facts["adapter"] = "" if adapter is None else _sha256((adapter / ADAPTER).read_bytes())
    except OSError:
        return None
    return Identity(facts, again)


class Memory:
    """What is remembered of one model from files, or of one part of it.

    Args:
        model: The model, with its head if it has one.
        base: The part of it that is compared.
        identity: What its files are.
    """

    def __init__(self, model: PreTrainedModel, base: PreTrainedModel, identity: Identity) -> None:
        self._base = base
        self._key = _key_of(model, base, identity)
        folder = None if self._key is None else cache_folder()
        self._path = None if folder is None else folder / f"{self._key}.json"
        self._document: dict[str, Any] = {} if identity.again else self._read()

    def survey(self, compute: Callable[[], Survey]) -> Survey:
        """Return what is remembered of the model's attention, else what `compute` finds out.

        Raises:
            AttnscopeError: The model cannot be shown truly: now, or when it was compared.
        """
        failure = self._document.get("failure")
        if failure is not None:
            raise AttnscopeError(failure["message"], failure["hint"])
        if "survey" in self._document:
            survey = _decode(self._document["survey"], self._base)
            if survey is not None:
                return replace(survey, remembered=self._when())
            self._document = {}
        try:
            survey = compute()
        except AttnscopeError as error:
            if _is_lasting(error):
                self._write({"failure": {"message": error.message, "hint": error.hint}})
            raise
        # Memory that was short then may suffice the next time.
        if not any(_speaks_of_memory(note) for note in survey.notes):
            encoded = _encode(survey, self._base)
            if encoded is not None:
                self._write({"survey": encoded})
        return survey

    @property
    def resumes(self) -> bool:
        """Whether it is remembered that a run may go on at a layer. False = it is not known."""
        return self._document.get("resumes") is True

    def remember_resumes(self) -> None:
        """Add that a run may go on at a layer."""
        if "survey" in self._document:
            self._write({**self._document, "resumes": True})

    def _when(self) -> str:
        return f"{self._document['date']} with torch {self._document['torch']}"

    def _read(self) -> dict[str, Any]:
        """Return the file's document; {} if there is none, or one that is damaged."""
        content = None if self._path is None else _read_file(self._path)
        try:
            document = parse_json(content or b"")
            _require(isinstance(document, dict))
            _require(document["schema"] == SCHEMA and document["key"] == self._key)
            _require(all(_is_line(document[name]) for name in ("date", "torch")))
            failure = document.get("failure")
            if failure is not None:
                _require(_is_line(failure["message"]) and isinstance(failure["hint"], str))
                remembered = f"this was found on {document['date']} with torch {document['torch']}"
                hint = "; ".join(part for part in (failure["hint"], remembered) if part)
                document["failure"] = {"message": failure["message"], "hint": f"{hint}: --check tries again"}
        except (ValueError, KeyError, TypeError):
            return {}
        return document  # type: ignore[no-any-return]  # a dict, as was required

    def _write(self, verdict: Mapping[str, Any]) -> None:
        """Write a verdict where that is possible; where it is not, nothing is remembered."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        about = {"schema": SCHEMA, "key": self._key, "date": today, "torch": torch.__version__}
        self._document = {**about, **verdict}
        content = json.dumps(self._document).encode()
        if self._path is None or len(content) > MOST_BYTES:
            return
        with contextlib.suppress(AttnscopeError, OSError):
            write_whole(self._path, content)
            _drop_oldest(self._path.parent)


def cache_folder() -> Path | None:
    """Return the folder of verdicts; None if there is no home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # As the specification has it, a relative path is as good as none.
        cache = Path(named) if Path(named).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return cache / "attnscope" / "checks"


# What a verdict depends on ---------------------------------------------------------------------------------------


def _key_of(model: PreTrainedModel, base: PreTrainedModel, identity: Identity) -> str | None:
    """Return a hash over all that a verdict depends on; None if part of it is unknown, such as where code lies."""
    sources = _sources_of(model)
    own_code = hash_sources(PACKAGE)
    if sources is None or own_code is None:
        return None
    tensors = itertools.chain(base.named_parameters(), base.named_buffers())
    facts = {
        **identity.facts,
        "attnscope": own_code,
        "code": _hash_files(sources),
        "packages": _versions(),
        "model": [_name_of(type(model)), _name_of(type(base))],
        "attention": [implementation_for(base), str(base.config._attn_implementation)],
        "tensors": [(name, list(x.shape), str(x.dtype), x.device.type) for name, x in tensors],
        "machine": _machine(base.device),
    }
    return _sha256(json.dumps(facts, sort_keys=True).encode())


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _sources_of(model: PreTrainedModel) -> list[Path] | None:
    """Return the files with the code of a model's parts, sorted; None if one of them has no file.

    Code that came with the model may import what lies beside it, so all of that counts.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    files: set[Path] = set()
    for name in {kind.__module__ for kind in kinds}:
        package = name.partition(".")[0]
        if package in _OF_TORCH:
            continue
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            return None
        files |= set(Path(file).parent.rglob("*.py")) if package == "transformers_modules" else {Path(file)}
    return sorted(files)


@functools.cache
def hash_sources(folder: Path) -> str | None:
    """Return the hash of all Python files below a folder, with their names; None if there are none."""
    files = sorted(folder.rglob("*.py"))
    return _hash_files(files, folder) if files else None


def _hash_files(files: Iterable[Path], folder: Path | None = None) -> str | None:
    digest = hashlib.sha256()
    try:
        for path in files:
            name = path.name if folder is None else path.relative_to(folder).as_posix()
            digest.update(f"{name} {_sha256(path.read_bytes())}\n".encode())
    except OSError:
        return None
    return digest.hexdigest()


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch itself": torch.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _machine(device: torch.device) -> list[str]:
    """Return what computes: kernels differ between processors, and a home folder may be on many machines."""
    precise = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        return ["cuda", torch.cuda.get_device_name(device), precise, str(torch.version.cuda)]
    return [device.type, platform.system(), platform.machine(), torch.backends.cpu.get_cpu_capability(), precise]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Which verdicts last ---------------------------------------------------------------------------------------------


def _is_lasting(error: BaseException) -> bool:
    """Whether a failure says something of the model, and is no error of other code, or for want of memory."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return all(isinstance(each, AttnscopeError | Unclear) and not _speaks_of_memory(str(each)) for each in causes)


def _speaks_of_memory(text: str) -> bool:
    return is_out_of_memory(RuntimeError(text))


# Surveys as plain JSON -------------------------------------------------------------------------------------------


def _encode(survey: Survey, base: PreTrainedModel) -> dict[str, Any] | None:
    """Return a survey as JSON values; None if it holds more than can be told so."""
    if survey.through is not None or survey.beside or survey.refusals or not survey.checked:
        return None
    names = {module: name for name, module in base.named_modules()}
    if any(module not in names for module in survey.plan):
        return None
    encoded: dict[str, Any] = {
        "path": survey.path,
        "plan": [[names[module], [list(place) for place in places]] for module, places in survey.plan.items()],
        "layers": {kind: list(numbers) for kind, numbers in survey.layers.items()},
        "n_layers": dict(survey.n_layers),
        "n_heads": dict(survey.n_heads),
        "n_kv_heads": dict(survey.n_kv_heads),
        "extras": dict(survey.extras),
        "d_model": survey.d_model,
        "notes": list(survey.notes),
        "reaches": list(survey.reaches),
    }
    try:
        read_back = json.loads(json.dumps(encoded))
    except (TypeError, ValueError):
        return None
    is_faithful = read_back == encoded and _decode(read_back, base) is not None
    return encoded if is_faithful else None


def _decode(encoded: Any, base: PreTrainedModel) -> Survey | None:
    """Return the survey that JSON values tell of; None if they do not fit together, or not the model."""
    try:
        layers: dict[Kind, tuple[int, ...]] = {}
        for kind, numbers in encoded["layers"].items():
            _require(kind in get_args(Kind) and len(numbers) == len(set(numbers)) > 0)
            layers[kind] = tuple(_number(number) for number in numbers)
        _require(len(layers) > 0)
        n_layers = _by_kind(encoded["n_layers"], layers)
        _require(all(max(numbers) < n_layers[kind] for kind, numbers in layers.items()))
        survey = Survey(
            path=encoded["path"],
            plan=_plan(encoded["plan"], base),
            layers=layers,
            n_layers=n_layers,
            n_heads=_by_kind(encoded["n_heads"], layers),
            n_kv_heads=_by_kind(encoded["n_kv_heads"], layers),
            extras=encoded["extras"],
            d_model=_number(encoded["d_model"]),
            checked=True,
            notes=tuple(encoded["notes"]),
            reaches=[_number(reach) for reach in encoded["reaches"]],
        )
        _require(survey.extras in ({}, {"output_hidden_states": True}))
        _require(isinstance(encoded["notes"], list) and all(map(_is_line, survey.notes)))
        places = sorted(place for of_module in survey.plan.values() for place in of_module)
        wanted = sorted((kind, number) for kind, numbers in layers.items() for number in numbers)
        _require((survey.path, places) in (("seam", wanted), ("eager", [])))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return survey


def _plan(encoded: Any, base: PreTrainedModel) -> dict[torch.nn.Module, list[Place]]:
    modules = dict(base.named_modules())
    plan: dict[torch.nn.Module, list[Place]] = {}
    for name, places in encoded:
        _require(modules[name] not in plan)
        plan[modules[name]] = [(kind, _number(layer)) for kind, layer in places]
    return plan


def _by_kind(encoded: Any, layers: Mapping[Kind, Any]) -> dict[Kind, int]:
    _require(list(encoded) == list(layers))
    _require(all(0 < _number(encoded[kind]) <= _MOST_LAYERS for kind in layers))
    return {kind: encoded[kind] for kind in layers}


def _number(value: Any) -> int:
    _require(type(value) is int and 0 <= value < _LARGEST)
    return int(value)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError


# Files -----------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> bytes | None:
    """Return what a small regular file holds; None for anything else. A link is not followed, nor a pipe waited for."""
    flags = os.O_RDONLY
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"):
        flags |= getattr(os, name, 0)
    try:
        handle = os.open(path, flags)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            return None
        return os.read(handle, MOST_BYTES)
    except OSError:
        return None
    finally:
        os.close(handle)


def _drop_oldest(folder: Path) -> None:
    """Delete the oldest verdicts where there are too many."""
    # A process that was killed may have left the file that it was writing.
    verdicts = [path for path in folder.iterdir() if path.suffix in (".json", ".part")]
    if len(verdicts) <= MOST_FILES:
        return
    ages: dict[Path, float] = {}
    for path in verdicts:
        with contextlib.suppress(OSError):  # another process was faster
            ages[path] = path.lstat().st_mtime
    for path in sorted(ages, key=ages.__getitem__)[:-MOST_FILES]:
        with contextlib.suppress(OSError):
            path.unlink()
