"""The verdict of the check at load: remembered for the same files and the same code, and for nothing else."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.errors import AttnscopeError
from attnscope.models.hf import assembling, check, survey
from attnscope.models.hf import model as hf_model
from attnscope.models.hf.model import HuggingFaceModel
from tests.conftest import edited, write_tiny, write_tokenizer


class Count(list[None]):
    """How often something was called since it was asked last."""

    def pop_all(self):
        n = len(self)
        self.clear()
        return n


@pytest.fixture
def compared(monkeypatch):
    """Counts surveys, each of which compares."""
    count = Count()
    compute = check.survey_attention

    def counted(*arguments, **named):
        count.append(None)
        return compute(*arguments, **named)

    monkeypatch.setattr(assembling, "survey_attention", counted)
    return count


def load(folder, **how):
    model = attnscope.load(folder, engine="hf", **how)
    assert isinstance(model, HuggingFaceModel)
    return model


def weights_of(model):
    probe = WeightsRecorder()
    model.run(attnscope.models.Batch(torch.tensor([[3, 7, 9, 4]])), probe)
    return [weights for by_layer in probe.maps.values() for weights in by_layer.values()]


def test_the_second_load_does_not_compare_and_shows_the_same(tiny_bert, compared):
    first = load(tiny_bert)
    assert compared.pop_all() == 1
    second = load(tiny_bert)
    assert compared.pop_all() == 0
    assert "remembered" in dict(second.info.listing("t"))["checked"]
    assert torch.__version__ in second.info.remembered
    assert not first.info.remembered
    assert "remembered" not in dict(first.info.listing("t"))["checked"]
    assert replace(second.info, remembered="") == first.info
    maps = zip(weights_of(first), weights_of(second), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in maps)
    whole = zip(vars(first.survey).items(), vars(second.survey).values(), strict=True)
    for (name, now), then in whole:
        if name == "plan":
            assert [*now.values()] == [*then.values()]
        elif name not in ("order", "remembered"):
            assert now == then, name


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        (
            "t5",
            {
                "d_model": 15,
                "d_kv": 5,
                "d_ff": 11,
                "num_layers": 2,
                "num_heads": 3,
                "decoder_start_token_id": 0,
            },
        ),
        ("albert", {"embedding_size": 15}),  # layers that share a module
        ("llama", {"sliding_window": 27, "num_key_value_heads": 3, "hidden_size": 24}),
    ],
)
def test_surveys_of_all_forms_are_kept_whole(model_type, more, tmp_path, compared, monkeypatch):
    monkeypatch.setattr(check, "_MAX_WORK_AT_LOAD", 1.0)  # windows are left to be compared later
    folder = write_tiny(tmp_path / model_type, model_type, **more)
    first = load(folder)
    second = load(folder)
    assert compared.pop_all() == 1
    assert replace(second.info, remembered="") == first.info
    assert second.survey.reaches == first.survey.reaches == ([27] if "sliding_window" in more else [])
    names = [{module: name for name, module in model.base.named_modules()} for model in (first, second)]
    plans = [
        [(name[module], list(places)) for module, places in model.survey.plan.items()]
        for name, model in zip(names, (first, second), strict=True)
    ]
    assert plans[0] == plans[1]


def test_a_refusal_is_not_remembered(tiny_bert, monkeypatch, empty_cache):
    def refuse(*_, **__):
        raise AttnscopeError("self-check: they differ")

    with monkeypatch.context() as patched:
        patched.setattr(check, "check_agreement", refuse)
        with pytest.raises(AttnscopeError, match="they differ"):
            load(tiny_bert)
    assert not empty_cache.exists()
    assert load(tiny_bert).info.checked


def test_both_parts_of_a_model_of_two_towers_have_a_verdict(tmp_path, compared):
    from transformers import CLIPConfig

    part = {"hidden_size": 15, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 11}
    words = {**part, "vocab_size": 90, "eos_token_id": 4, "bos_token_id": 3, "pad_token_id": 0}
    seen = {**part, "image_size": 8, "patch_size": 4}
    config = CLIPConfig(text_config=words, vision_config=seen, projection_dim=7)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    settings = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 8},
        "crop_size": 8,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings), "utf-8")
    for n in (2, 0):
        model = load(tmp_path)
        assert model.image_reader is not None
        assert compared.pop_all() == n


def change_a_byte(folder):
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return {}


def change_config(folder):
    edited(folder, id2label={"0": "no name that attention depends on"})
    return {}


@pytest.mark.parametrize("change", [change_a_byte, change_config, lambda _: {"dtype": "float64"}])
def test_another_model_is_compared(change, tiny_bert, compared):
    load(tiny_bert)
    how = change(tiny_bert)
    compared.clear()
    load(tiny_bert, **how)
    assert compared.pop_all() == 1
    load(tiny_bert, **how)
    assert compared.pop_all() == 0


def test_other_code_of_ours_or_another_version_compares(tiny_bert, tmp_path, compared, monkeypatch):
    for name in ("a", "b"):
        for folder in ("core/attention", "models/hf"):
            shutil.copytree(
                survey.PACKAGE / folder, tmp_path / name / folder, ignore=lambda *_: ["__pycache__"]
            )
    source = tmp_path / "b/core/attention/seam.py"
    source.write_bytes(source.read_bytes() + b"\n")
    for name, n in (("a", 1), ("a", 0), ("b", 1), ("b", 0), ("a", 0)):
        monkeypatch.setattr(survey, "PACKAGE", tmp_path / name)
        load(tiny_bert)
        assert compared.pop_all() == n
    monkeypatch.setattr(survey, "versions", lambda: {"torch": "0.1"})
    load(tiny_bert)
    assert compared.pop_all() == 1


def test_an_option_compares_and_another_neither_compares_nor_remembers(tiny_bert, compared, empty_cache):
    assert load(tiny_bert, check=False).info.checked is False
    assert not empty_cache.exists()
    load(tiny_bert)
    compared.clear()
    assert not load(tiny_bert, check=True).info.remembered
    assert compared.pop_all() == 1
    model = load(tiny_bert, check=False)
    assert (model.info.checked, model.info.remembered) == (False, "")


def test_models_in_memory_are_never_remembered(tiny_bert, compared, empty_cache):
    for _ in range(2):
        attnscope.load(AutoModel.from_pretrained(tiny_bert))
        assert compared.pop_all() == 1
    assert not empty_cache.exists()


DAMAGES = (
    lambda whole: [whole],
    lambda whole: {"verdict": whole["verdict"]},
    lambda whole: {**whole, "sha256": "0" * 64},
    lambda whole: {**whole, "verdict": None},
    lambda whole: {**whole, "verdict": {**whole["verdict"], "resumes": True}},
    lambda whole: {**whole, "verdict": {**whole["verdict"], "plan": []}},
)


def test_a_damaged_file_is_no_verdict(tiny_bert, empty_cache, compared):
    load(tiny_bert)
    (path,) = empty_cache.iterdir()
    whole = path.read_bytes()
    damaged = [json.dumps(damage(json.loads(whole))).encode() for damage in DAMAGES]
    for content in (*damaged, b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}'):
        compared.clear()
        path.write_bytes(content)
        load(tiny_bert)
        assert compared.pop_all() == 1, content[:90]
        assert path.read_bytes() == whole, "it is mended"
        load(tiny_bert)
        assert compared.pop_all() == 0


def test_where_nothing_can_be_written_nothing_is_remembered(tiny_bert, tmp_path, compared, monkeypatch):
    (tmp_path / "file").touch()

    def refuse():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", refuse)
    for cache in (tmp_path / "file", "/proc/nowhere", "", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        assert not load(tiny_bert).info.remembered
    assert compared.pop_all() == 4
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("file", "tiny-bert")] == []


def test_that_a_run_may_go_on_at_a_layer_is_remembered_if_so(tmp_path, monkeypatch):
    from transformers import GPT2Config

    config = GPT2Config(
        n_embd=15, n_head=3, n_layer=2, n_positions=64, vocab_size=90, bos_token_id=3, eos_token_id=4
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    tried = Count()
    answers = iter([False, True])

    def try_it(*_):
        tried.append(None)
        return next(answers)

    monkeypatch.setattr(hf_model, "can_resume", try_it)
    wanted = ((None, False, 1), (None, True, 1), (None, True, 0))
    for option, resumes, n in wanted:
        assert load(tmp_path, check=option).resumes is resumes
        assert tried.pop_all() == n
    monkeypatch.undo()
    assert load(tmp_path).resumes


def test_info_says_when_it_was_compared_and_takes_the_option(tiny_bert, run):
    command = ("models", tiny_bert, "--engine", "hf")
    assert "remembered since" not in " ".join(run(*command).out.split())
    assert "and remembered since" in " ".join(run(*command).out.split())
    assert json.loads(run(*command, "--json").out)["remembered"].endswith(
        f" with torch {torch.__version__}"
    )
    assert "remembered since" not in " ".join(run(*command, "--check").out.split())
    assert "comparison with eager attention was skipped" in " ".join(
        run(*command, "--no-check").out.split()
    )
