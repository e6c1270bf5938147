"""Which files of a folder, of the Hub or of its cache hold a model's weights, and what files hash to."""

import contextlib
import hashlib
import re
import threading
from collections.abc import Collection
from pathlib import Path

from attnscope.errors import AttnscopeError, first_line, parse_json


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """Return the files that hold the model's weights, sorted by name: safetensors, whole or in shards."""
    present = {path.name for path in folder.iterdir()}
    stem, is_sharded = _find_stem(str(folder), present, allow_pickle)
    return _shards(folder, f"{stem}.index.json", present) if is_sharded else [folder / stem]


def _find_stem(where: str, names: Collection[str], allow_pickle: bool) -> tuple[str, bool]:
    """Return the name of the files of weights, and whether they are shards with an index.

    Refused where there are none.
    """
    for stem in ("model.safetensors", *(["pytorch_model.bin"] if allow_pickle else [])):
        if stem in names or f"{stem}.index.json" in names:
            return stem, stem not in names
    raise _no_weights(where, names)


def weights_sha256(folder: Path) -> str:
    """Return the hash of a model's weights: one file's SHA-256, or that of sorted "name:hash" lines for several files.

    Remembers what it hashed (until a file changes), and a second thread that asks waits for the first, so that a
    thread can hash while torch loads. Hashing frees the interpreter lock.
    """
    # One file's hash is the one that the Hub shows for it.
    files = weight_files(folder, allow_pickle=True)
    hashes = {path.name: file_sha256(path) for path in files}
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _shards(folder: Path, index: str, present: Collection[str]) -> list[Path]:
    try:
        # The index maps each tensor to its shard.
        names = sorted(set(parse_json((folder / index).read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise AttnscopeError(f"{folder / index} lists no weights: {first_line(error)}", "get the file again") from error
    missing = [name for name in names if name not in present]
    if missing or not names:
        raise AttnscopeError(
            f"{folder} lacks {missing[0] if missing else 'weights'}: {len(missing)} of {len(names)} shards are missing",
            "get the missing files, or delete the folder to download it again",
        )
    return [folder / name for name in names]


def _no_weights(where: str, names: Collection[str]) -> AttnscopeError:
    # Say what is there instead: pickles need a decision, other formats a conversion.
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    if pickles:
        return AttnscopeError(
            f"{where} holds its weights only as a pickle, {pickles[0]}, and loading one can run any code",
            "--allow-pickle if you trust where it came from, or convert it to model.safetensors",
        )
    return AttnscopeError(f"{where} holds no model.safetensors", "give a folder or a Hub id with safetensors")


def holds_gguf(folder: Path) -> bool:
    """Return whether a folder's weights, configuration and tokenizer are a GGUF file, which transformers unpacks."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def require_model(folder: Path, allow_pickle: bool) -> None:
    """Refuse a folder that lacks a configuration or weights, by an AttnscopeError."""
    if holds_gguf(folder):
        return
    if not (folder / "config.json").is_file():
        inner = sorted(path.parent for path in folder.glob("*/config.json"))
        hint = f"did you mean {inner[0]}?" if inner else "a model's folder holds config.json, weights and tokenizer"
        raise AttnscopeError(f"{folder} holds no config.json, so it is not a model's folder", hint)
    weight_files(folder, allow_pickle=allow_pickle)


def name_weights(repo_id: str, names: Collection[str], allow_pickle: bool) -> set[str]:
    """Return which of the files of a Hub repository hold its weights; an AttnscopeError where none do."""
    stem, is_sharded = _find_stem(f"{repo_id} on the Hub", names, allow_pickle)
    prefix, _, suffix = stem.partition(".")
    shard = re.compile(rf"{prefix}-\d+-of-\d+\.{suffix}")
    return {name for name in names if shard.fullmatch(name)} if is_sharded else {stem}


MAIN = "main"
"""The branch of a Hub repository that is meant where no revision is named."""

HUB = "Hugging Face Hub, "
"""The start of the origin of every Hub model; its id and commit follow."""


def _cache() -> Path:
    from huggingface_hub import constants  # this module of it loads in milliseconds, its API does not

    return Path(constants.HF_HUB_CACHE)


def cached_ids() -> list[str]:
    """Return the ids of all models in the cache, complete or not, sorted."""
    try:
        return sorted(path.name.removeprefix("models--").replace("--", "/") for path in _cache().glob("models--*"))
    except OSError:  # the home folder of another user, as sudo leaves it
        return []


def cached_folder(repo_id: str, allow_pickle: bool = False, revision: str = MAIN) -> Path | None:
    """Return the snapshot of a Hub model in the cache, if it is complete.

    Reads the documented layout: the API takes 0.6 s.
    """
    with contextlib.suppress(OSError, ValueError, AttnscopeError):
        folder = find_snapshot(repo_id, revision)
        require_model(folder, allow_pickle)
        return folder
    return None


def _home(repo_id: str) -> Path:
    return _cache() / f"models--{repo_id.replace('/', '--')}"


def find_snapshot(repo_id: str, revision: str) -> Path:
    """Return the folder of a revision's snapshot, whether it exists or not."""
    home = _home(repo_id)
    # Branches and tags are files that hold a commit; a commit is its own name.
    named = home / "refs" / revision
    return home / "snapshots" / (named.read_text("ascii").strip() if named.is_file() else revision)


_hash_lock = threading.Lock()
_hashed: dict[tuple[Path, int, int], str] = {}


def hashes() -> dict[tuple[Path, int, int], str]:
    """Return the hashes that this process knows, by path, size and time of change, for processes that it starts."""
    with _hash_lock:
        return dict(_hashed)


def remember_hashes(others: dict[tuple[Path, int, int], str]) -> None:
    """Take over the `hashes` of another process: files that have not changed need no hashing again."""
    with _hash_lock:
        _hashed.update(others)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; remembered until it changes."""
    try:
        with _hash_lock, path.open("rb") as file:
            state = path.stat()
            key = (path.resolve(), state.st_size, state.st_mtime_ns)
            if key not in _hashed:
                _hashed[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return _hashed[key]
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
