"""The verdict of the check at load: remembered for the same files and the same code, and for nothing else."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import attnscope
from attnscope.core.attention.probes import Weights
from attnscope.errors import AttnscopeError, RoundingError
from attnscope.models.hf import assembling, check, rounding, verdicts
from attnscope.models.hf import model as hf_model
from attnscope.models.hf.model import HuggingFaceModel
from attnscope.models.hf.survey import Survey
from attnscope.models.hf.verdicts import Memory
from tests.conftest import Run, edited, write_tiny, write_tokenizer

DIFFERS = "self-check: hidden states differ from the model's own by 0.5; rounding explains at most 1e-05"


class Count(list[None]):
    """How often something was called since it was asked last."""

    def pop_all(self) -> int:
        n = len(self)
        self.clear()
        return n


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Count:
    """Counts surveys, each of which compares."""
    count, compute = Count(), check.survey_attention

    def counted(*arguments: Any, **named: Any) -> Any:
        count.append(None)
        return compute(*arguments, **named)

    monkeypatch.setattr(assembling, "survey_attention", counted)
    return count


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Exception], None]]:
    """Has the comparison fail."""

    def fail(error: Exception) -> None:
        def compare(*arguments: object, **_: object) -> None:
            if len(arguments) > 4:  # it is told which layers there are; else it explains an error
                raise error

        monkeypatch.setattr(check, "compare", compare)

    yield fail


def load(folder: Path, **how: Any) -> HuggingFaceModel:
    model = attnscope.load(folder, engine="hf", **how)
    assert isinstance(model, HuggingFaceModel)
    return model


def weights_of(model: HuggingFaceModel) -> list[torch.Tensor]:
    probe = Weights()
    model.run(attnscope.models.Batch(torch.tensor([[3, 7, 9, 4]])), probe)
    return [weights for by_layer in probe.maps.values() for weights in by_layer.values()]


def test_the_second_load_does_not_compare_and_shows_the_same(tiny_bert: Path, compared: Count) -> None:
    first = load(tiny_bert)
    assert compared.pop_all() == 1
    second = load(tiny_bert)
    assert compared.pop_all() == 0
    assert "remembered" in dict(second.info.lines("t"))["checked"]
    assert torch.__version__ in second.info.remembered
    assert not first.info.remembered and "remembered" not in dict(first.info.lines("t"))["checked"]
    assert replace(second.info, remembered="") == first.info
    maps = zip(weights_of(first), weights_of(second), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in maps)
    whole = zip(vars(first.survey).items(), vars(second.survey).values(), strict=True)
    for (name, now), then in whole:
        if name == "plan":
            assert [*now.values()] == [*then.values()]
        elif name != "remembered":
            assert now == then, name


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("t5", {"d_model": 15, "d_kv": 5, "d_ff": 11, "num_layers": 2, "num_heads": 3, "decoder_start_token_id": 0}),
        ("albert", {"embedding_size": 15}),  # layers that share a module
        (
            "gpt_neo",
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 27, "num_heads": 3},
        ),
    ],
)
def test_surveys_of_all_forms_are_kept_whole(model_type: str, more: Any, tmp_path: Path, compared: Count) -> None:
    folder = write_tiny(tmp_path / model_type, model_type, **more)
    first, second = load(folder), load(folder)
    assert compared.pop_all() == 1
    assert replace(second.info, remembered="") == first.info
    assert second.survey.reaches == first.survey.reaches == ([27] if "window_size" in more else [])
    names = [{module: name for name, module in model.base.named_modules()} for model in (first, second)]
    plans = [
        [(name[module], list(places)) for module, places in model.survey.plan.items()]
        for name, model in zip(names, (first, second), strict=True)
    ]
    assert plans[0] == plans[1]


def test_both_parts_of_a_model_of_two_towers_have_a_verdict(tmp_path: Path, compared: Count) -> None:
    from transformers import CLIPConfig

    part = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 11}
    words = {**part, "vocab_size": 90, "eos_token_id": 4, "bos_token_id": 3, "pad_token_id": 0}
    seen = {**part, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=words, vision_config=seen, projection_dim=7)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    settings = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 8}, "crop_size": 8}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), "utf-8")
    for n in (2, 0):
        model = load(tmp_path)
        assert model.eyes is not None
        assert compared.pop_all() == n


def change_a_byte(folder: Path) -> dict[str, Any]:
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {}


def change_config(folder: Path) -> dict[str, Any]:
    edited(folder, id2label={"0": "no name that attention depends on"})
    return {}


@pytest.mark.parametrize("change", [change_a_byte, change_config, lambda _: {"dtype": "float64"}])
def test_another_model_is_compared(change: Callable[[Path], Any], tiny_bert: Path, compared: Count) -> None:
    load(tiny_bert)
    how = change(tiny_bert)
    compared.clear()
    load(tiny_bert, **how)
    assert compared.pop_all() == 1
    load(tiny_bert, **how)
    assert compared.pop_all() == 0


def test_other_code_of_ours_or_another_version_compares(
    tiny_bert: Path, tmp_path: Path, compared: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(verdicts.PACKAGE / "core" / "attention", tmp_path / "a", ignore=lambda *_: ["__pycache__"])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    source = tmp_path / "b" / "seam.py"
    source.write_bytes(source.read_bytes() + b"\n")
    for name, n in (("a", 1), ("a", 0), ("b", 1), ("b", 0), ("a", 0)):
        monkeypatch.setattr(verdicts, "PACKAGE", tmp_path / name)
        load(tiny_bert)
        assert compared.pop_all() == n
    monkeypatch.setattr(verdicts, "versions", lambda: {"torch": "0.1"})
    load(tiny_bert)
    assert compared.pop_all() == 1


def test_an_option_compares_and_another_neither_compares_nor_remembers(
    tiny_bert: Path, compared: Count, empty_cache: Path
) -> None:
    assert load(tiny_bert, check=False).info.checked is False
    assert not empty_cache.exists()
    load(tiny_bert)
    compared.clear()
    assert not load(tiny_bert, check=True).info.remembered and compared.pop_all() == 1
    model = load(tiny_bert, check=False)
    assert (model.info.checked, model.info.remembered) == (False, "")


def test_a_failure_is_remembered_and_tried_again_when_asked(
    tiny_bert: Path, compared: Count, wrong: Callable[[Exception], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context():
        wrong(AttnscopeError(DIFFERS, "try another --dtype"))
        with pytest.raises(AttnscopeError, match="differ") as first:
            load(tiny_bert)
    monkeypatch.setattr(check, "compare", lambda *_, **__: None)
    compared.clear()
    with pytest.raises(AttnscopeError) as second:
        load(tiny_bert)
    assert compared.pop_all() == 0
    assert second.value.message == first.value.message
    assert second.value.hint.startswith("try another --dtype; this was found on ")
    assert second.value.hint.endswith(": --check tries again")
    assert load(tiny_bert, check=True).info.checked and compared.pop_all() == 1
    assert load(tiny_bert).info.remembered and compared.pop_all() == 0


@pytest.mark.parametrize("cause", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), OSError("disk")])
def test_a_failure_of_the_machine_is_not_remembered(
    cause: Exception, tiny_bert: Path, wrong: Callable[[Exception], None], empty_cache: Path
) -> None:
    error = AttnscopeError(DIFFERS)
    error.__cause__ = cause
    wrong(error)
    with pytest.raises(AttnscopeError):
        load(tiny_bert)
    assert not empty_cache.exists()


def test_a_survey_that_memory_was_short_for_is_not_remembered(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    def starve(*_: object) -> Any:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")

    with monkeypatch.context() as patched:
        patched.setattr(check, "rehearse", starve)
        assert load(tiny_bert).info.path == "eager"
    assert not empty_cache.exists()
    assert load(tiny_bert).info.path == "seam"


def test_no_memory_for_a_copy_in_float64_is_the_cause_of_a_failure(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starve(*_: object) -> Any:
        raise MemoryError

    def differ(*_: object) -> Any:
        raise RoundingError(DIFFERS)

    monkeypatch.setattr(rounding, "_require_equal", differ)
    monkeypatch.setattr(rounding, "copy", SimpleNamespace(deepcopy=starve))
    with pytest.raises(AttnscopeError, match="rounding explains") as failed:
        load(tiny_bert)
    assert not verdicts.is_lasting(failed.value)


def test_models_in_memory_are_never_remembered(tiny_bert: Path, compared: Count, empty_cache: Path) -> None:
    for _ in range(2):
        attnscope.load(AutoModel.from_pretrained(tiny_bert))
        assert compared.pop_all() == 1
    assert not empty_cache.exists()


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda whole: [whole],
    "no checksum": lambda whole: {"verdict": whole["verdict"]},
    "of another model": lambda whole: {**whole, "sha256": "0" * 64},
    "no verdict": lambda whole: {**whole, "verdict": None},
    "another date": lambda whole: {**whole, "verdict": {**whole["verdict"], "date": 3}},
    "may go on at a layer": lambda whole: {**whole, "verdict": {**whole["verdict"], "resumes": True}},
    "a failure": lambda whole: {**whole, "verdict": {"failure": ["no", "way"]}},
    **{
        f"{name} = {value}": lambda whole, name=name, value=value: {
            **whole,
            "verdict": {**whole["verdict"], "survey": {**whole["verdict"]["survey"], name: value}},
        }
        for name, value in (
            ("path", "eager"),
            ("plan", []),
            ("layers", {"encoder": [0, 0]}),
            ("n_heads", {"encoder": True}),
            ("extras", {"use_cache": True}),
            ("d_model", -1),
            ("notes", "text"),
            ("reaches", ["a"]),
        )
    },
}


def memory_of(model: HuggingFaceModel, folder: Path) -> Memory:
    identity = verdicts.identify(folder, model.info.sha256, None, again=False)
    assert identity is not None
    return Memory(model.model, model.base, identity)


def is_remembered(model: HuggingFaceModel, folder: Path) -> bool:
    """Whether what a load asks for is there, without comparing; where it is not, it is written again."""
    count = Count()

    def compute() -> Survey:
        count.append(None)
        return model.survey

    memory_of(model, folder).survey(compute)
    return not count


def test_a_damaged_file_is_no_verdict(tiny_bert: Path, empty_cache: Path) -> None:
    model = load(tiny_bert)
    (path,) = empty_cache.iterdir()
    whole = json.loads(path.read_text("utf-8"))
    for name, damage in DAMAGES.items():
        damaged = damage(whole)
        path.write_text(json.dumps(damaged), "utf-8")
        memory = memory_of(model, tiny_bert)
        with pytest.raises(ZeroDivisionError):
            memory.survey(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
        assert not memory.resumes, name
        assert not is_remembered(model, tiny_bert), name
        assert json.loads(path.read_text("utf-8")) == whole, "it is mended"
        assert is_remembered(model, tiny_bert)


def test_what_is_no_json_is_no_verdict(tiny_bert: Path, empty_cache: Path) -> None:
    model = load(tiny_bert)
    (path,) = empty_cache.iterdir()
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b" " * 300_000 + path.read_bytes()):
        path.write_bytes(content)
        assert not is_remembered(model, tiny_bert), content[:9]
        assert is_remembered(model, tiny_bert)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_regular_files_are_read(kind: str, tiny_bert: Path, tmp_path: Path, empty_cache: Path) -> None:
    model = load(tiny_bert)
    (path,) = empty_cache.iterdir()
    elsewhere = path.rename(tmp_path / "verdict.json")
    {"link": lambda: path.symlink_to(elsewhere), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    assert not is_remembered(model, tiny_bert)
    assert not is_remembered(model, tiny_bert)
    assert path.is_symlink() or not path.is_file()  # and it is left as it is


def test_where_nothing_can_be_written_nothing_is_remembered(
    tiny_bert: Path, tmp_path: Path, compared: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()

    def refuse() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    for cache in (tmp_path / "file", "/proc/nowhere", "", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        assert not load(tiny_bert).info.remembered
    assert compared.pop_all() == 4
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("file", "tiny-bert")] == []


def test_that_a_run_may_go_on_at_a_layer_is_remembered_if_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import GPT2Config

    config = GPT2Config(n_embd=15, n_head=3, n_layer=2, n_positions=64, vocab_size=90, bos_token_id=3, eos_token_id=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tried, answers = Count(), iter([False, True])

    def try_it(*_: object) -> bool:
        tried.append(None)
        return next(answers)

    monkeypatch.setattr(hf_model, "can_resume", try_it)
    wanted = ((None, False, 1), (None, True, 1), (None, True, 0))
    for option, resumes, n in wanted:
        assert load(tmp_path, check=option).resumes is resumes
        assert tried.pop_all() == n
    monkeypatch.undo()
    assert load(tmp_path).resumes


def test_info_says_when_it_was_compared_and_takes_the_option(tiny_bert: Path, run: Run) -> None:
    command = ("models", tiny_bert, "--engine", "hf")
    assert "remembered since" not in " ".join(run(*command).out.split())
    assert "and remembered since" in " ".join(run(*command).out.split())
    assert json.loads(run(*command, "--json").out)["remembered"].endswith(f" with torch {torch.__version__}")
    assert "remembered since" not in " ".join(run(*command, "--check").out.split())
    assert "comparison with eager attention was skipped" in " ".join(run(*command, "--no-check").out.split())
