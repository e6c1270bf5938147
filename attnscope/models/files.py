"""Find the files that hold a model's weights, in a folder, on the Hub or in its cache, and hash them.

Loading and downloading them is left to others.
"""

import contextlib
import fnmatch
import hashlib
import threading
from collections.abc import Collection
from pathlib import Path

from attnscope.errors import AttnscopeError, first_line, parse_json

MAIN = "main"
"""The branch of a Hub repository that is meant where no revision is named."""

HUB = "Hugging Face Hub, "
"""How records say that a model came from the Hub; its id and commit follow."""

_hash_lock = threading.Lock()
HASHES: dict[tuple[Path, int, int], str] = {}
"""The hashes of files that were hashed already, by path, size and time of change; handed to processes that are started,
which need not hash again what has not changed."""


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """Return the files that hold the model's weights, sorted by name: safetensors, whole or in shards."""
    # One file, or the shards that its index lists.
    names = {path.name for path in folder.iterdir()}
    whole, is_sharded = _find_weights(str(folder), names, allow_pickle)
    if is_sharded:
        return _shards(folder, f"{whole}.index.json", names)
    return [folder / whole]


def _find_weights(where: str, names: Collection[str], allow_pickle: bool) -> tuple[str, bool]:
    """Return the name that the weights have as one file, and whether they are shards with an index instead.

    Args:
        where: What a message calls the folder or the repository.
        names: The names of all its files.
        allow_pickle: Whether the weights may be a pickle.

    Raises:
        AttnscopeError: None of the files holds weights.
    """
    # Safetensors win over a pickle, one file over shards.
    accepted = ["model.safetensors"]
    if allow_pickle:
        accepted.append("pytorch_model.bin")
    for whole in accepted:
        if whole in names:
            return whole, False
        if f"{whole}.index.json" in names:
            return whole, True
    # Say what is there instead: pickles need a decision, other formats a conversion.
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise AttnscopeError(
            f"{where} holds its weights only as a pickle, {min(pickles)}, and loading one can run any code",
            "--allow-pickle if you trust where it came from, or convert it to model.safetensors",
        )
    raise AttnscopeError(
        f"{where} holds no model.safetensors", "give a folder or a Hub id with safetensors"
    )


def weights_sha256(folder: Path) -> str:
    """Return the hash of a model's weights: one file's SHA-256, or that of sorted "name:hash" lines for several files.

    Each file is hashed once, until it changes. A second thread that asks waits for the first, so that a thread can
    hash while torch loads: hashing frees the interpreter lock.
    """
    hashes = {path.name: file_sha256(path) for path in weight_files(folder, allow_pickle=True)}
    # One file's hash is the one that the Hub shows for it.
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    lines = "".join(f"{name}:{sha256}\n" for name, sha256 in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _shards(folder: Path, index: str, present: Collection[str]) -> list[Path]:
    """Return the shards that an index lists, all of which must be present, by an AttnscopeError."""
    try:
        # The index maps each tensor to its shard.
        names = sorted(set(parse_json((folder / index).read_text("utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise AttnscopeError(
            f"{folder / index} lists no weights: {first_line(error)}", "get the file again"
        ) from error
    missing = [name for name in names if name not in present]
    if missing or not names:
        lacking = missing[0] if missing else "weights"
        raise AttnscopeError(
            f"{folder} lacks {lacking}: {len(missing)} of {len(names)} shards are missing",
            "get the missing files, or delete the folder to download it again",
        )
    return [folder / name for name in names]


def holds_gguf(folder: Path) -> bool:
    """Return whether a folder's weights are a GGUF file, which has configuration and tokenizer in it."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def require_model(folder: Path, allow_pickle: bool) -> None:
    """Refuse a folder that lacks a configuration or weights, by an AttnscopeError."""
    if holds_gguf(folder):
        return
    if not (folder / "config.json").is_file():
        # A model may lie one folder deeper.
        inner = sorted(path.parent for path in folder.glob("*/config.json"))
        hint = (
            f"did you mean {inner[0]}?"
            if inner
            else "a model's folder holds config.json, weights and tokenizer"
        )
        raise AttnscopeError(f"{folder} holds no config.json, so it is not a model's folder", hint)
    weight_files(folder, allow_pickle=allow_pickle)


def choose_weights(repo_id: str, names: Collection[str], allow_pickle: bool) -> set[str]:
    """Return which of the files of a Hub repository hold its weights; an AttnscopeError where none do."""
    whole, is_sharded = _find_weights(f"{repo_id} on the Hub", names, allow_pickle)
    if not is_sharded:
        return {whole}
    # Shards have numbers, such as model-00001-of-00002.safetensors.
    return set(fnmatch.filter(names, whole.replace(".", "-[0-9]*-of-[0-9]*.")))


def _cache() -> Path:
    """Return the folder of the Hub's cache."""
    from huggingface_hub import constants  # this module of it loads in milliseconds, its API does not

    return Path(constants.HF_HUB_CACHE)


def cached_ids() -> list[str]:
    """Return the ids of all models in the cache, complete or not, sorted."""
    try:
        return sorted(
            path.name.removeprefix("models--").replace("--", "/") for path in _cache().glob("models--*")
        )
    except OSError:  # the home folder of another user, as sudo leaves it
        return []


def cached_folder(
    repo_id: str, allow_pickle: bool = False, revision: str = MAIN, config_only: bool = False
) -> Path | None:
    """Return the folder of a Hub model in the cache, if it is complete, or has its configuration; else None.

    It reads the cache's documented layout: the Hub's own client takes 0.6 s to load.
    """
    home = _cache() / f"models--{repo_id.replace('/', '--')}"
    with contextlib.suppress(OSError, ValueError, AttnscopeError):
        # Branches and tags are files that hold a commit; a commit is its own name.
        reference = home / "refs" / revision
        commit = reference.read_text("ascii").strip() if reference.is_file() else revision
        folder = home / "snapshots" / commit
        if not (config_only and (folder / "config.json").is_file()):
            require_model(folder, allow_pickle)
        return folder
    return None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; remembered until it changes."""
    try:
        with _hash_lock, path.open("rb") as file:
            # A file that changes has another size or time, and is hashed again.
            state = path.stat()
            key = (path.resolve(), state.st_size, state.st_mtime_ns)
            if key not in HASHES:
                HASHES[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return HASHES[key]
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
