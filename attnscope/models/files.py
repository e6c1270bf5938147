"""Find the files that hold a model's weights, in a folder, on the Hub or in its cache, and hash them.

Loading and downloading is left to other modules.
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
"""How the origin of a model from the Hub begins; its id and commit follow."""

_hash_lock = threading.Lock()
HASHES: dict[tuple[Path, int, int], str] = {}
"""The SHA-256 of files that were hashed already, by path, size, and time of change in nanoseconds. Worker processes get
a copy, so that they need not hash the files again."""


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """Return the files that hold the model's weights, sorted by name: one file, or its shards.

    They are safetensors; with `allow_pickle` they may be pickles, where there are no safetensors.
    """
    names = {path.name for path in folder.iterdir()}
    file, is_sharded = _find_weights(str(folder), names, allow_pickle)
    if is_sharded:
        return _shards(folder, f"{file}.index.json", names)
    return [folder / file]


def _find_weights(place: str, names: Collection[str], allow_pickle: bool) -> tuple[str, bool]:
    """Return the name of the file that holds the weights, and whether shards hold them in its place.

    Args:
        place: What a message calls the folder or the repository.
        names: The names of all its files.
        allow_pickle: Whether the weights may be a pickle.

    Raises:
        AttnscopeError: None of the files holds weights.
    """
    # Safetensors come before a pickle, and one file before shards, which an index lists.
    accepted = ["model.safetensors"]
    if allow_pickle:
        accepted.append("pytorch_model.bin")
    for file in accepted:
        if file in names:
            return file, False
        if f"{file}.index.json" in names:
            return file, True
    # The user may allow a pickle; other formats have to be converted.
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise AttnscopeError(
            f"{place} holds its weights only as a pickle, {min(pickles)}, and loading one can run any code",
            "--allow-pickle if you trust where it came from, or convert it to model.safetensors",
        )
    raise AttnscopeError(
        f"{place} holds no model.safetensors", "give a folder or a Hub id with safetensors"
    )


def weights_sha256(folder: Path) -> str:
    """Return the hash of a model's weights: the SHA-256 of their file, as the Hub shows it.

    Of several files it is the SHA-256 of a text with a line "name:hash" for each, sorted by name.
    """
    paths = weight_files(folder, allow_pickle=True)
    if len(paths) == 1:
        return file_sha256(paths[0])
    lines = "".join(f"{path.name}:{file_sha256(path)}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()


def _shards(folder: Path, index: str, present: Collection[str]) -> list[Path]:
    """Return the shards that an index lists, sorted by name.

    Raises:
        AttnscopeError: The index cannot be read, or lists a shard that is not among the `present` files.
    """
    try:
        # The index maps the name of each tensor to its shard.
        weight_map = parse_json((folder / index).read_text("utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise AttnscopeError(
            f"{folder / index} lists no weights: {first_line(error)}", "get the file again"
        ) from error
    missing = [name for name in names if name not in present]
    if missing:
        raise AttnscopeError(
            f"{folder} lacks {missing[0]}: {len(missing)} of {len(names)} shards are missing",
            "get the missing files, or delete the folder to download it again",
        )
    return [folder / name for name in names]


def holds_gguf(folder: Path) -> bool:
    """Return whether a folder's weights are GGUF files, which hold configuration and tokenizer too."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def require_model(folder: Path, allow_pickle: bool, config_only: bool) -> None:
    """Refuse a folder without config.json, or without weights unless `config_only`, by an AttnscopeError."""
    if holds_gguf(folder):
        return
    if not (folder / "config.json").is_file():
        hint = "a model's folder holds config.json, weights and tokenizer"
        # A model may lie one folder deeper.
        configs = sorted(folder.glob("*/config.json"))
        if configs:
            hint = f"did you mean {configs[0].parent}?"
        raise AttnscopeError(f"{folder} holds no config.json, so it is not a model's folder", hint)
    if not config_only:
        weight_files(folder, allow_pickle=allow_pickle)


def choose_weights(repo_id: str, names: Collection[str], allow_pickle: bool) -> set[str]:
    """Return the names of the files in a Hub repository that hold its weights.

    Raises:
        AttnscopeError: None of its files does.
    """
    file, is_sharded = _find_weights(f"{repo_id} on the Hub", names, allow_pickle)
    if not is_sharded:
        return {file}
    # The shards of model.safetensors are called model-00001-of-00002.safetensors and so on.
    return set(fnmatch.filter(names, file.replace(".", "-[0-9]*-of-[0-9]*.")))


def _cache() -> Path:
    """Return the folder of the Hub's cache."""
    # Constants load in milliseconds; the whole client of the Hub takes 0.6 s.
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_ids() -> list[str]:
    """Return the ids of all models in the cache, complete or not, sorted."""
    try:
        return sorted(
            path.name.removeprefix("models--").replace("--", "/") for path in _cache().glob("models--*")
        )
    except OSError:  # such as the home folder of another user, after sudo
        return []


def cached_folder(
    repo_id: str, allow_pickle: bool = False, revision: str = MAIN, config_only: bool = False
) -> Path | None:
    """Return the folder of a Hub model in the cache; None where it is not there, or not complete.

    With `config_only` its configuration is enough. The layout of the cache is documented, so that the Hub's client,
    which takes 0.6 s to load, is not needed.
    """
    repository = _cache() / f"models--{repo_id.replace('/', '--')}"
    with contextlib.suppress(OSError, ValueError, AttnscopeError):
        # A branch or a tag is a file that holds its commit. Any other revision is a commit itself.
        commit = revision
        reference = repository / "refs" / revision
        if reference.is_file():
            commit = reference.read_text("ascii").strip()
        folder = repository / "snapshots" / commit
        require_model(folder, allow_pickle, config_only)
        return folder
    return None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; a file is hashed once, until it changes.

    One thread hashes at a time, and others wait. Hashing frees the interpreter lock, so that a thread can hash while
    another imports torch.
    """
    try:
        with _hash_lock, path.open("rb") as file:
            state = path.stat()
            key = (path.resolve(), state.st_size, state.st_mtime_ns)
            if key not in HASHES:
                HASHES[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return HASHES[key]
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
