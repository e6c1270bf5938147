"""Models with adapters of peft: merged in from files, taken as they are in memory, or refused; never left out."""

import json
import shutil

import pytest
import torch
import transformers

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attend
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models import load, resolve
from attnscope.models.files import file_sha256
from attnscope.models.hf import parts
from attnscope.models.model import Batch
from tests.test_hf_files import SIZES, llama, saved

peft = pytest.importorskip("peft", reason="the extra [peft] is not installed")

# peft itself asks transformers for what is to be renamed; users are not told, in the tests warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def bert_classifier():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(**SIZES, num_hidden_layers=2)
    )


def adapted(base, folder, cls, targets, **more):
    """A LoRA of a model in a folder, with weights large enough to matter, saved into another folder."""
    model = cls.from_pretrained(base, attn_implementation="eager")
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, **more)
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    wrapped.save_pretrained(folder)
    return wrapped.eval()


def maps(model, ids):
    probe = WeightsRecorder()
    model.run(Batch(ids), probe)
    (found,) = probe.maps.values()
    return torch.stack(list(found.values()))


@pytest.fixture
def tuned(tmp_path):
    """A Llama's folder, that of its LoRA, and peft's own model with eager attention."""
    base = saved(llama(), tmp_path / "base")
    return (
        base,
        tmp_path / "lora",
        adapted(base, tmp_path / "lora", transformers.LlamaForCausalLM, ["q_proj", "v_proj"]),
    )


IDS = torch.randint(5, 55, (1, 13), generator=torch.Generator().manual_seed(0))


def test_maps_are_those_of_peft_by_folder_by_option_and_in_memory(tuned):
    base, lora, wrapped = tuned
    with torch.no_grad():
        expected = torch.stack(wrapped(IDS, output_attentions=True).attentions)
    plain = maps(load(str(base)), IDS)
    assert float((plain - expected).abs().max()) > 0.05
    for shown in (
        load(str(lora)),
        load(str(base), adapter=lora),
        load(resolve(str(base)), adapter=str(lora)),
    ):
        torch.testing.assert_close(maps(shown, IDS), expected, rtol=0, atol=2e-5)
        assert shown.info.name == "base+lora"
        assert shown.info.adapter == "lora"
        assert shown.info.adapter_sha256 == file_sha256(lora / "adapter_model.safetensors")
        assert shown.info.notes[0].startswith("Adapter lora (sha256 ")
        assert "adapter_sha256" in shown.info.as_json()
    held = attnscope.load(wrapped)
    torch.testing.assert_close(maps(held, IDS), expected, rtol=0, atol=2e-5)
    assert held.info.adapter == "default"
    with wrapped.disable_adapter():
        off = attnscope.load(wrapped)
        torch.testing.assert_close(maps(off, IDS), plain, rtol=0, atol=2e-5)
    assert off.info.adapter == ""
    assert off.info.notes[0] == "The model's adapters are switched off: this is the base."


def test_an_adapter_beside_its_base_is_applied_or_refused_never_left_out(tuned, tmp_path, monkeypatch):
    base, lora, wrapped = tuned
    with torch.no_grad():
        expected = torch.stack(wrapped(IDS, output_attentions=True).attentions)
    beside = shutil.copytree(base, tmp_path / "beside")
    for path in lora.glob("adapter_*"):
        shutil.copy(path, beside)
    torch.testing.assert_close(maps(load(str(beside)), IDS), expected, rtol=0, atol=2e-5)
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: None)
    for spec in (beside, lora):
        with pytest.raises(AttnscopeError, match="needs the package peft") as caught:
            load(str(spec))
        assert "attnscope[peft]" in caught.value.hint


def test_the_adapter_of_a_model_with_a_head_is_fitted_to_its_base(tmp_path):
    base = saved(bert_classifier(), tmp_path / "base")
    cls = transformers.BertForSequenceClassification
    wrapped = adapted(base, tmp_path / "lora", cls, ["query", "key"], task_type="SEQ_CLS")
    shown = load(str(tmp_path / "lora"))
    with torch.no_grad():
        output = wrapped(IDS, output_attentions=True)
        logits = shown.outputs(Batch(IDS), attend).logits
    torch.testing.assert_close(maps(shown, IDS), torch.stack(output.attentions), rtol=0, atol=2e-5)
    torch.testing.assert_close(logits[:, 0], output.logits, rtol=0, atol=2e-5)
    assert shown.info.head.startswith("kept: BertForSequenceClassification")
    assert shown.info.engine == "hf"


def test_adapters_that_do_not_fit_are_refused_in_one_line(tuned, tmp_path):
    base, lora, _ = tuned
    other = saved(bert_classifier(), tmp_path / "other")
    with pytest.raises(AttnscopeError, match="does not fit the model"):
        load(str(other), adapter=lora)
    with pytest.raises(AttnscopeError, match=r"holds no adapter_config\.json"):
        load(str(base), adapter=other)
    with pytest.raises(UsageError, match="on one device"):
        load(str(lora), device_map="auto")
    with pytest.raises(AttnscopeError, match="the native engine does not run .*: it has an adapter"):
        load(str(lora), engine="native")
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")})
    )
    with pytest.raises(AttnscopeError, match="is an adapter, .*gone") as caught:
        load(str(lora))
    assert "--adapter" in caught.value.hint
    (lora / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(lora)})
    )
    (lora / "config.json").unlink(missing_ok=True)
    with pytest.raises(AttnscopeError, match="that is an adapter, too") as caught:
        load(str(lora))
    assert len(str(caught.value)) < 500
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    with pytest.raises(AttnscopeError, match=r"holds no adapter_model\.safetensors"):
        load(str(base), adapter=lora)


def test_prefixes_are_refused_since_they_are_no_text(tuned, tmp_path):
    base, _, _ = tuned
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    wrapped = peft.get_peft_model(model, settings)
    wrapped.save_pretrained(tmp_path / "prefix")
    for given in (lambda: attnscope.load(wrapped), lambda: load(str(base), adapter=tmp_path / "prefix")):
        with pytest.raises(AttnscopeError, match="tokens that are no text"):
            given()


def test_the_command_line_takes_an_adapter_and_the_record_names_it(tuned, run, tmp_path):
    base, lora, _ = tuned
    out = tmp_path / "out"
    status, _, err = run("heatmap", "a b c", "-m", base, "--adapter", lora, "-f", "json", "-o", out)
    assert status == 0, err
    (path,) = out.glob("*.json")
    told = json.loads(path.read_text())["run"]
    assert told["model"] == "base+lora"
    assert told["adapter"] == "lora"
    assert len(told["adapter_sha256"]) == 64
    assert told["sha256"] != load(str(base)).info.sha256
