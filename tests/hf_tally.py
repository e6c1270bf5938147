"""Every model type of transformers, shrunk to tiny, through `wrap`: exact, refused, or why it cannot be tried.

    python -m tests.hf_tally [--json docs/architectures.json] [--workers 2] [model_type ...]

prints a line a model and the tally. Each one that is shown is compared with a second copy of the model that was built
with eager attention from the start, on texts of three lengths, alone and padded, or on a picture or sound: no code is
shared with the self-check.
"""

import argparse
import contextlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers import AutoModel, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from attnscope.core.attention.probes import WeightsRecorder
from attnscope.errors import AttnscopeError
from attnscope.models.hf.assembling import wrap
from attnscope.models.hf.examples import make_examples
from attnscope.models.hf.model import HuggingFaceModel
from attnscope.models.hf.parts import fixed_arguments, hidden_states, reads_text, sees_pictures_only
from attnscope.models.model import Batch, image_model_of

VOCABULARY = 99
_PATIENCE_S = 120
_A_PROCESS = 60
"""Types that one process judges: what they leave in memory adds up."""

LONG = 1100
"""Tokens of the long text: more than the windows, blocks and chunks of most models, and where light masks are used."""
POSITIONS = 1280
ALLOWED = 2e-4
"""Difference of a weight, or relative to the largest hidden state, up to which it is rounding (scores go to 100)."""


@dataclass(frozen=True)
class Verdict:
    """What becomes of a model type.

    Attributes:
        verdict: "exact", "refused", "no attention", "unbuilt" (no tiny one can be made or run here), or "wrong".
        reads: "text", "pictures", "sound", or two of them.
        road: As of ModelInfo, "" where it is not shown.
        differences: The largest difference from eager attention, by what it was on.
        why: Why it is refused or cannot be built; of an exact one, what it refuses.
    """

    verdict: str
    reads: str = ""
    road: str = ""
    differences: dict[str, float] = field(default_factory=dict)
    why: str = ""

    def told(self) -> str:
        return " ".join(f"{gap:.1e}" for gap in self.differences.values()) + f" {self.why[:200]}"


# What to make of a setting, by its name. Sizes are multiples of 8: grouped matrix products want 16 bytes.
_SIZES = {
    32: "hidden_size d_model n_embd dim emb_dim embed_dim embedding_size d_embed hidden_dim n_embed model_dim "
    "encoder_hidden_size decoder_hidden_size rnn_hidden_size attention_hidden_size out_hidden_size pred_hidden_size",
    48: "intermediate_size d_ff ffn_dim n_inner encoder_ffn_dim decoder_ffn_dim moe_intermediate_size d_inner "
    "shared_expert_intermediate_size ffn_hidden_size intermediate_dim encoder_intermediate_size "
    "decoder_intermediate_size expert_ffn_hidden_size block_ff_dim feed_forward_size "
    "moe_shared_expert_intermediate_size intermediate_size_mlp dense_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads decoder_num_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts num_swa_attention_heads n_experts num_moe_experts "
    "pred_num_attention_heads",
    2: "num_key_value_heads num_kv_heads encoder_num_key_value_heads decoder_num_key_value_heads "
    "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_selected_experts",
    1: "n_shared_experts num_shared_experts n_group topk_group moe_num_shared_experts first_k_dense_replace "
    "num_mem_blocks num_nextn_predict_layers",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim kv_channels d_head "
    "global_head_dim index_head_dim swa_head_dim mamba_d_state mamba_d_head ssm_state_size state_size time_step_rank "
    "linear_key_head_dim linear_value_head_dim",
    16: "kv_lora_rank q_lora_rank mamba_chunk_size chunk_size qk_head_dim",
    3: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers encoder_num_hidden_layers decoder_num_hidden_layers depth pred_num_hidden_layers",
    64: "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions seq_length",
    VOCABULARY: "vocab_size encoder_vocab_size decoder_vocab_size text_vocab_size n_tokens entity_vocab_size",
}
_BY_NAME = {name: size for size, names in _SIZES.items() for name in names.split()}
_BY_NAME |= {"sliding_window": 4, "initializer_range": 0.2, "vocab_size_per_layer_input": VOCABULARY}


_PICTURE = {"image_size": 32, "patch_size": 8}

_OTHERS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("tiny_settings.json").read_text("utf-8")
)
"""What cannot be told from a setting's name, by model type."""


def tiny_settings(config: Any, positions: int = 64) -> dict[str, Any]:
    """Arguments that make a configuration tiny, for texts of so many tokens; inner configurations too."""
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            # Any model type may be a backbone, so that its settings name it.
            named = {"model_type": value.model_type} if name == "backbone_config" else {}
            settings[name] = named | tiny_settings(value, positions)
        elif (
            name in _BY_NAME
            and (value is not None or name == "num_key_value_heads")
            and not isinstance(value, list | tuple | dict)
        ):
            settings[name] = positions if _BY_NAME[name] == 64 else _BY_NAME[name]
        elif name in _PICTURE and isinstance(value, int):
            settings[name] = _PICTURE[name]
        elif name.endswith("_token_id") and isinstance(value, int):
            settings[name] = value % 7
        elif name.endswith("_token_id") and isinstance(value, list):
            settings[name] = [5]
    for name in config.attribute_map.values():
        # One for each stage.
        if name in _BY_NAME and not isinstance(vars(config).get(name), list | tuple):
            settings[name] = positions if _BY_NAME[name] == 64 else _BY_NAME[name]
    given = vars(config)
    if "kv_lora_rank" in given or "q_lora_rank" in given:
        settings["num_key_value_heads"] = 4
    rope = given.get("rope_parameters") or given.get("rope_scaling")
    if isinstance(rope, dict) and "mrope_section" in rope:
        settings["rope_parameters"] = {
            **rope,
            "mrope_section": [1, 1, 2],
            "rope_theta": rope.get("rope_theta") or 1e4,
        }
    settings |= _OTHERS.get(config.model_type, {})
    if "layer_types" in vars(config) and config.layer_types:
        kinds = list(dict.fromkeys(settings.get("layer_types", config.layer_types)))
        layers = max(3, len(kinds))
        settings["layer_types"] = (kinds * layers)[:layers]
        settings["num_hidden_layers"] = layers
    return settings


def boost(model: nn.Module, seed: int = 0) -> None:
    """Random weights large enough for heads that differ and look somewhere: fresh ones attend to all alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def build(model_type: str, positions: int = 64) -> PreTrainedModel | str:
    """A tiny model, or why there is none."""
    try:
        config = transformers.AutoConfig.for_model(model_type)
        config = type(config)(**tiny_settings(config, positions))
        with torch.device("meta"):
            shape = AutoModel.from_config(config)
        if sum(parameter.numel() for parameter in shape.parameters()) > 70_000_000:
            return "is not tiny"
        torch.manual_seed(0)
        model = AutoModel.from_config(config)
    except Exception as error:
        return f"does not build: {type(error).__name__}: {_line(error)}"
    with contextlib.suppress(ValueError):
        model.set_experts_implementation("eager")
    boost(model)
    return model.eval()


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    config = type(model.config)(**model.config.to_dict())
    twin = type(model)._from_config(config, attn_implementation="eager")
    with contextlib.suppress(ValueError):
        twin.set_experts_implementation("eager")
    lacking = twin.load_state_dict(model.state_dict(), strict=False)
    assert not lacking.unexpected_keys
    assert all("pooler" in key for key in lacking.missing_keys)
    return twin.eval()


def batches(is_encoder_decoder: bool, lengths: tuple[int, int] = (11, 7)) -> list[Batch]:
    """Two texts of unequal length, padded together, then alone. Longer than the self-check's: windows are 4 wide."""
    generator = torch.Generator().manual_seed(1)

    def numbers(lengths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.randint(10, VOCABULARY - 20, (2, max(lengths)), generator=generator)
        return ids, torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]

    ids, mask = numbers(lengths)
    target, target_mask = numbers((4, 6))
    given: list[dict[str, Any]] = [
        {"ids": ids, "mask": mask},
        {"ids": ids[:1]},
        {"ids": ids[1:, : lengths[1]]},
    ]
    targets: list[dict[str, Any]] = [
        {"target_ids": target, "target_mask": target_mask},
        {"target_ids": target[:1, :4]},
        {"target_ids": target[1:]},
    ]
    return [
        Batch(**one, **(two if is_encoder_decoder else {}))
        for one, two in zip(given, targets, strict=True)
    ]


def difference_from_eager(
    shown: HuggingFaceModel, model: PreTrainedModel, given: Sequence[Batch] | None = None
) -> float:
    """The largest difference of a weight, or of a hidden state (relative), at real positions.

    Raises:
        AssertionError: There are other layers.
    """
    twin = eager_twin(model)
    seq2seq = bool(model.config.is_encoder_decoder)
    worst = 0.0
    for batch in given or batches(seq2seq):
        probe = WeightsRecorder()
        with torch.no_grad():
            hidden = shown.run(batch, probe)
            inputs = {"input_ids": batch.ids, "output_attentions": True}
            if batch.mask is not None:
                inputs["input_ids"] = batch.ids.masked_fill(~batch.mask, _pad(model))
                inputs["attention_mask"] = batch.mask.long()
            if seq2seq:
                inputs["decoder_input_ids"] = batch.target_ids
            if batch.target_mask is not None:
                inputs["decoder_input_ids"] = batch.target_ids.masked_fill(
                    ~batch.target_mask, _pad(model)
                )
                inputs["decoder_attention_mask"] = batch.target_mask.long()
            inputs |= fixed_arguments(twin)
            try:
                output = twin(**inputs)
            # No working eager attention: compared with the model's own hidden states alone.
            except RuntimeError:
                inputs.pop("output_attentions")
                output = model(**inputs)
            if hidden_states(output) is None:
                output = twin(**inputs, output_hidden_states=True)
        queries = batch.mask if not seq2seq else batch.target_mask
        own = hidden
        other = hidden_states(output)
        if queries is not None:
            own = own[queries]
            other = other[queries]
        worst = _larger(worst, (own - other).abs().max() / other.abs().max())
        names = {
            "encoder": "encoder_attentions",
            "decoder": "decoder_attentions",
            "cross": "cross_attentions",
        }
        if not seq2seq:
            names = dict.fromkeys(probe.maps, "attentions")
            assert len(names) == 1
        for kind, name in names.items():
            theirs = [w for w in getattr(output, name, None) or () if w is not None]
            ours = list(probe.maps[kind].values())
            layer_types = getattr(model.config, "layer_types", None) or ()
            if len(theirs) == len(layer_types):  # some give out the states of linear layers too
                theirs = [w for w, name in zip(theirs, layer_types, strict=True) if "linear" not in name]
            if not theirs:
                continue  # none are given out: equal hidden states have to do
            assert len(ours) == len(theirs), f"{kind}: {len(ours)} layers, eager {len(theirs)}"
            real = batch.target_mask if seq2seq and kind != "encoder" else batch.mask
            for w, e in zip(ours, theirs, strict=True):
                if hasattr(model.config, "attention_window") and e.shape[-1] % 2 and kind == "encoder":
                    # They give out a band around the diagonal: what of our row lies in it.
                    width = e.shape[-1]
                    padded = torch.nn.functional.pad(w, (width // 2, width // 2))
                    w = torch.stack(
                        [padded[:, :, query, query : query + width] for query in range(w.shape[2])], 2
                    )
                assert w.shape == e.shape, f"{kind}: {tuple(w.shape)}, eager {tuple(e.shape)}"
                gap = (w - e).abs().amax(-1).transpose(1, 2)
                if "Sinks" in str(shown.info.notes):
                    # Some eager functions give their weights out before the sink takes its part.
                    gap = gap.minimum((w - e * w.sum(-1, keepdim=True)).abs().amax(-1).transpose(1, 2))
                worst = _larger(worst, (gap if real is None else gap[real]).max())
    return worst


def judge(model_type: str) -> Verdict:
    """What becomes of a model type, shrunk to tiny: see `Verdict`."""
    try:
        model = build(model_type, POSITIONS)
    except Exception as error:
        model = f"{type(error).__name__}: {_line(error)}"
    if isinstance(model, str):
        return Verdict("unbuilt", why=model)
    try:
        shown = wrap(model)
    except AttnscopeError as error:
        if "\n" in str(error):
            return Verdict("wrong", why=f"several lines: {error.message}")
        if "does not run on the" in error.message and runs_as_configured(model_type):
            return Verdict(
                "unbuilt", why=f"as configured it runs, shrunk to tiny it does not: {error.message}"
            )
        return Verdict(
            "no attention" if "has no attention" in error.message else "refused", why=error.message
        )
    except Exception as error:
        return Verdict("wrong", why=f"{type(error).__name__}: {_line(error)}")
    found: dict[str, float] = {}
    why, reads = "", ""
    for part in dict.fromkeys((shown, image_model_of(shown))):
        base = part.base
        hears = base.main_input_name in ("input_values", "input_features")
        what = (
            "text"
            if reads_text(base)
            else "pictures"
            if sees_pictures_only(base)
            else "sound"
            if hears
            else "numbers"
        )
        reads = f"{reads} and {what}" if reads else what
        for name, compare in _comparisons(part, what):
            try:
                found[name] = compare()
            except AttnscopeError as error:
                why = f"{name}: {error.message}"
            except Exception as error:
                return Verdict(
                    "wrong",
                    reads,
                    shown.info.path,
                    found,
                    f"{name}: {type(error).__name__}: {_line(error)}",
                )
    if any(not gap < ALLOWED for gap in found.values()):
        return Verdict("wrong", reads, shown.info.path, found, why)
    if not found:
        return Verdict("refused", reads, shown.info.path, found, why)
    return Verdict("exact", reads, shown.info.path, found, why)


def runs_as_configured(model_type: str) -> bool:
    """Whether a model of the sizes that transformers sets takes the self-check's input: on "meta", without numbers."""
    try:
        with torch.device("meta"), torch.no_grad():
            model = AutoModel.from_config(transformers.AutoConfig.for_model(model_type)).eval()
            inputs = {**fixed_arguments(model), **make_examples(model)[1]}
            model(
                **{
                    name: value.to("meta") if torch.is_tensor(value) else value
                    for name, value in inputs.items()
                }
            )
    except Exception:  # a model may fail in any way, and without numbers in more
        return False
    return True


def _comparisons(shown: HuggingFaceModel, what: str) -> list[tuple[str, Callable[[], float]]]:
    """By what to call them: the comparisons of a model with eager attention."""
    base = shown.base
    if what != "text":
        return [(what, lambda: _difference_on(shown, base, make_examples(base)[1]))]
    seq2seq = bool(base.config.is_encoder_decoder)
    made: list[tuple[str, Callable[[], float]]] = []
    for lengths in ((7, 5), (37, 7), (LONG, LONG - 1)):
        given = batches(seq2seq, lengths)
        # A long text is run alone, which is enough to see windows, blocks and masks by key.
        kept = given[1:2] if lengths[0] == LONG else given
        made.append((f"{lengths[0]} tokens", lambda kept=kept: difference_from_eager(shown, base, kept)))  # type: ignore[misc]
    return made


def _difference_on(shown: HuggingFaceModel, base: PreTrainedModel, inputs: dict[str, Any]) -> float:
    """The largest difference from eager attention on what is no text."""
    probe = WeightsRecorder()
    twin = eager_twin(base)
    tensors = {name: x for name, x in inputs.items() if torch.is_tensor(x)}
    with torch.no_grad():
        hidden = shown.run_inputs(tensors, probe)
        output = twin(**tensors, output_attentions=True)
    other = hidden_states(output)
    worst = 0.0 if other is None else float((hidden - other).abs().max() / other.abs().max())
    names = {
        "encoder": "encoder_attentions",
        "decoder": "decoder_attentions",
        "cross": "cross_attentions",
    }
    for kind, by_layer in probe.maps.items():
        name = names[kind] if base.config.is_encoder_decoder else "attentions"
        theirs = [weights for weights in getattr(output, name, None) or () if weights is not None]
        assert not theirs or len(theirs) == len(by_layer), (
            f"{kind}: {len(by_layer)} layers, eager {len(theirs)}"
        )
        for own, eager in zip(by_layer.values(), theirs, strict=False):
            worst = _larger(worst, (own - eager).abs().max())
    return worst


def _larger(worst: float, gap: torch.Tensor) -> float:
    """The larger of two differences; NaN if either is, which Python's `max` drops."""
    return float(torch.maximum(torch.tensor(worst, dtype=gap.dtype), gap))


def model_types() -> list[str]:
    """The model types that AutoModel knows."""
    return sorted(set(MODEL_MAPPING_NAMES) & set(CONFIG_MAPPING_NAMES))


# Many types, each with a limit of time, to be gone on with ---------------------------------------------------------


def tally(wanted: list[str], path: Path | None, n_workers: int) -> dict[str, Verdict]:
    """Judges types in processes of their own; writes what is known after each one, and goes on where it was stopped."""
    done: dict[str, Verdict] = {}
    if path is not None and path.is_file():
        held = json.loads(path.read_text("utf-8"))
        if held["transformers"] == transformers.__version__:
            done = {name: Verdict(**one) for name, one in held["types"].items()}
    waiting = [name for name in wanted if name not in done]
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                mine = [waiting.pop(0) for _ in range(min(_A_PROCESS, len(waiting)))]
            for name, verdict in _judged_apart(mine):
                with lock:
                    done[name] = verdict
                    print(f"{name:28} {verdict.verdict:12} {verdict.told()}", flush=True)
                    if path is not None:
                        _write(path, done)

    with ThreadPoolExecutor(n_workers) as pool:
        list(pool.map(lambda _: work(), range(n_workers)))
    return {name: done[name] for name in wanted}


def _judged_apart(names: list[str]) -> Iterator[tuple[str, Verdict]]:
    """Judges types in one process, and in another one after each that takes too long or takes the process with it."""
    names = list(names)
    while names:
        with subprocess.Popen(
            [sys.executable, "-m", "tests.hf_tally", "--lines", *names],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            try:
                while names:
                    # The first line takes the imports too.
                    if not select.select([process.stdout], [], [], _PATIENCE_S)[0]:
                        yield names.pop(0), Verdict("unbuilt", why=f"takes more than {_PATIENCE_S} s")
                        break
                    line = process.stdout.readline()
                    if not line:
                        yield (
                            names.pop(0),
                            Verdict("unbuilt", why="ends its process (memory, or an error in C)"),
                        )
                        break
                    name, told = json.loads(line)
                    assert name == names.pop(0)
                    yield name, Verdict(**told)
            finally:
                process.kill()


def _write(path: Path, done: dict[str, Verdict]) -> None:
    about = {
        "transformers": transformers.__version__,
        "known": len(model_types()),
        "long": LONG,
        "allowed": ALLOWED,
    }
    head = json.dumps(about)[:-1]
    # A line each: what changed shows.
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(asdict(done[name]))}" for name in sorted(done)
    )
    aside = path.with_suffix(".part")
    aside.write_text(f'{head}, "types": {{\n{lines}\n}}}}\n', encoding="utf-8")
    aside.replace(path)


def summary(results: dict[str, Verdict]) -> str:
    counts = Counter(one.verdict for one in results.values())
    told = ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common())
    return f"transformers {transformers.__version__}: {len(results)} model types: {told}"


def _pad(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(), "pad_token_id", None) or 0


def _line(error: BaseException) -> str:
    said = (str(error).strip().splitlines() or [""])[0]
    return re.sub(r"[^\s'\"]*site-packages/", "", said)[:160]  # of this machine alone


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument(
        "--json", type=Path, help="where verdicts are kept; those that it holds are not found again"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument(
        "--lines", action="store_true", help="judge in this process, a line of JSON each"
    )
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(100)
    torch.set_num_threads(1)
    if given.lines:
        stdout, sys.stdout = sys.stdout, sys.stderr  # some models print
        for name in given.model_types:
            print(json.dumps([name, asdict(judge(name))]), file=stdout, flush=True)
        return 0
    results = tally(given.model_types or model_types(), given.json, given.workers)
    print(summary(results))
    return int(any(one.verdict == "wrong" for one in results.values()))


if __name__ == "__main__":
    sys.exit(main())
