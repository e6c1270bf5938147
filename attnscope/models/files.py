"""Find the files that hold a model's weights, in a folder, on the Hub or in the Hub's cache, and hash them.

Other modules download and load them.
"""

import contextlib
import fnmatch
import hashlib
import threading
from collections.abc import Collection
from pathlib import Path

from attnscope.errors import AttnscopeError, first_line, parse_json

DEFAULT_REVISION = "main"
"""The branch of a Hub repository that is taken if the user names no revision."""

HUB_ORIGIN_PREFIX = "Hugging Face Hub, "
"""How `Source.origin` begins for a model from the Hub, such as "Hugging Face Hub, org/name@COMMIT"."""

_hash_lock = threading.Lock()
SHA256_BY_FILE: dict[tuple[Path, int, int], str] = {}
"""(path, size in bytes, time of the last change in ns) -> SHA-256, for each file that was hashed already. Worker
processes get a copy, so that they need not hash the files again."""


def weight_files(folder: Path, *, allow_pickle: bool = False) -> list[Path]:
    """Return the files that hold the model's weights, sorted by name: one file, or its shards.

    The files are safetensors. With `allow_pickle` they are pickles if the folder holds no safetensors.

    Raises:
        AttnscopeError: The folder holds no weights, or a shard is missing.
    """
    names = {path.name for path in folder.iterdir()}
    file, is_sharded = _find_weight_file(str(folder), names, allow_pickle)
    if is_sharded:
        return _list_shards(folder, f"{file}.index.json", names)
    return [folder / file]


def _find_weight_file(container: str, names: Collection[str], allow_pickle: bool) -> tuple[str, bool]:
    """Return the name of the file that holds the weights, and whether it is split into shards.

    If it is, the file itself does not exist: FILE.index.json lists its shards.

    Args:
        container: The folder or repository, as a message names it.
        names: The names of all files in it.
        allow_pickle: Whether the weights may be a pickle.

    Raises:
        AttnscopeError: None of the files holds weights.
    """
    # Prefer safetensors to a pickle, and one file to shards.
    accepted_files = ["model.safetensors"]
    if allow_pickle:
        accepted_files.append("pytorch_model.bin")
    for file in accepted_files:
        if file in names:
            return file, False
        if f"{file}.index.json" in names:
            return file, True
    # The user may allow a pickle. Weights in any other format must be converted first.
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickles:
        raise AttnscopeError(
            f"{container} holds its weights only as a pickle, {min(pickles)}, and loading one can run any code",
            "--allow-pickle if you trust where it came from, or convert it to model.safetensors",
        )
    raise AttnscopeError(
        f"{container} holds no model.safetensors", "give a folder or a Hub id with safetensors"
    )


def weights_sha256(folder: Path) -> str:
    """Return the hash of a model's weights: for one file its SHA-256, as the Hub shows it.

    For shards, return the SHA-256 of a text with one line "name:hash" per shard, sorted by name.
    """
    paths = weight_files(folder, allow_pickle=True)
    if len(paths) == 1:
        return file_sha256(paths[0])
    lines = "".join(f"{path.name}:{file_sha256(path)}\n" for path in paths)
    return hashlib.sha256(lines.encode()).hexdigest()


def _list_shards(folder: Path, index_name: str, file_names: Collection[str]) -> list[Path]:
    """Return the shards that an index lists, sorted by name. `file_names` are all files in the folder.

    Raises:
        AttnscopeError: The index cannot be read, or lists a shard that is not in the folder.
    """
    try:
        # The index maps the name of each tensor to its shard.
        weight_map = parse_json((folder / index_name).read_text("utf-8"))["weight_map"]
        shard_names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise AttnscopeError(
            f"{folder / index_name} lists no weights: {first_line(error)}", "get the file again"
        ) from error
    missing_names = [name for name in shard_names if name not in file_names]
    if missing_names:
        raise AttnscopeError(
            f"{folder} lacks {missing_names[0]}: {len(missing_names)} of {len(shard_names)} shards are missing",
            "get the missing files, or delete the folder to download it again",
        )
    return [folder / name for name in shard_names]


def holds_gguf(folder: Path) -> bool:
    """Return whether a folder's weights are GGUF files. A GGUF file holds the configuration and the tokenizer too."""
    return any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors"))


def require_model_files(folder: Path, allow_pickle: bool, config_only: bool) -> None:
    """Raise an AttnscopeError if a folder lacks config.json, or (unless `config_only`) weights."""
    # A GGUF file holds both.
    if holds_gguf(folder):
        return
    if not (folder / "config.json").is_file():
        hint = "a model's folder holds config.json, weights and tokenizer"
        # Hint at a model in a subfolder.
        configs = sorted(folder.glob("*/config.json"))
        if configs:
            hint = f"did you mean {configs[0].parent}?"
        raise AttnscopeError(f"{folder} holds no config.json, so it is not a model's folder", hint)
    # Called for the error that it raises if weights are missing.
    if not config_only:
        weight_files(folder, allow_pickle=allow_pickle)


def choose_weight_files(repo_id: str, names: Collection[str], allow_pickle: bool) -> set[str]:
    """Return the names of the files in a Hub repository that hold its weights.

    Raises:
        AttnscopeError: No file holds weights in a format that is allowed.
    """
    file, is_sharded = _find_weight_file(f"{repo_id} on the Hub", names, allow_pickle)
    if not is_sharded:
        return {file}
    # The index is not downloaded yet. The shards of model.safetensors are model-00001-of-00002.safetensors and so on.
    return set(fnmatch.filter(names, file.replace(".", "-[0-9]*-of-[0-9]*.")))


def _cache_folder() -> Path:
    """Return the folder of the Hub's cache."""
    # Import only the constants, in milliseconds: the whole Hub client takes 0.6 s.
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def cached_repo_ids() -> list[str]:
    """Return the ids of all models in the Hub's cache, such as "org/name", complete or not, sorted."""
    try:
        return sorted(
            path.name.removeprefix("models--").replace("--", "/")
            for path in _cache_folder().glob("models--*")
        )
    except OSError:  # the cache is not readable: after sudo it may be in another user's home folder
        return []


def cached_folder(
    repo_id: str, allow_pickle: bool = False, revision: str = DEFAULT_REVISION, config_only: bool = False
) -> Path | None:
    """Return the folder of a Hub model in the cache; None if it is not there, or not complete.

    With `config_only` its configuration is enough. The path follows from the documented layout of the cache:
    models--ORG--NAME/snapshots/COMMIT. So the Hub's client, which takes 0.6 s to load, is not needed.
    """
    repository = _cache_folder() / f"models--{repo_id.replace('/', '--')}"
    # Any error on the way means that the model is not there, or not complete.
    with contextlib.suppress(OSError, ValueError, AttnscopeError):
        # Replace a branch or a tag by its commit, which a file holds. Any other revision is a commit itself.
        reference = repository / "refs" / revision
        if reference.is_file():
            revision = reference.read_text("ascii").strip()
        folder = repository / "snapshots" / revision
        require_model_files(folder, allow_pickle, config_only)
        return folder
    return None


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hex. A file is hashed again only after it has changed.

    One thread hashes at a time: another that needs the same hash waits, and reads it from SHA256_BY_FILE. Hashing
    releases Python's global interpreter lock, so that one thread can hash while another imports torch.
    """
    try:
        with _hash_lock, path.open("rb") as file:
            stat = path.stat()
            key = (path.resolve(), stat.st_size, stat.st_mtime_ns)
            if key not in SHA256_BY_FILE:
                SHA256_BY_FILE[key] = hashlib.file_digest(file, "sha256").hexdigest()
            return SHA256_BY_FILE[key]
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or first_line(error)}") from error
