"""Lists of heads in the forms that other programs read: one table, an entry per form, each with its source."""

from __future__ import annotations

import base64
import gzip
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np

from attnscope.errors import AttnscopeError, UsageError, one_line, parse_json
from attnscope.records import Record
from attnscope.records.frame.file_sets import replace_together
from attnscope.records.frame.storage import finite, is_stream, plain, write_stream, write_whole
from attnscope.records.heads.findings import RECORDINGS
from attnscope.records.heads.scores import HeadScores, full_attention_values, require_needles, scores_of
from attnscope.records.relations.record import Relations
from attnscope.version import VERSION

SCHEMA = "attnscope.scores/1"

_CONFIG = "config.json"

SINK_SIZE, RECENT_SIZE = 64, 256
"""First and latest tokens that a streaming head keeps, as DuoAttention is trained with them."""

MOST_NEEDLES = 10**5
"""More needles at one depth than anybody reads; a record of more is damaged."""

Heads = list[list[int]]


class StreamSizes(TypedDict, total=False):
    """How many of the first and of the latest tokens a streaming head keeps: 64 and 256."""

    sink_size: int
    recent_size: int


@dataclass(frozen=True, eq=False)
class Order:
    """A list to write into a file or folder."""

    scores: HeadScores
    out: Path
    top: int | None = None  # heads at most; None = all that pass the record's test
    sinks: HeadScores | None = None  # the scores `resting_share` of the same model
    sink_size: int = SINK_SIZE
    recent_size: int = RECENT_SIZE

    @property
    def heads(self) -> Heads:
        """(layer, head) of those that are listed, the best first."""
        if not self.scores.chosen:
            raise AttnscopeError(
                f"no head passes the test on {self.scores.name}, so there is none to list",
                "study more texts; --for scores writes the scores of all heads",
            )
        return [list(head) for head in self.scores.chosen[: self.top]]


@dataclass(frozen=True)
class Format:
    """A form of list."""

    source: str  # the program, its file that reads the form, and the version of it
    write: Callable[[Order], Mapping[str, bytes]]  # file name -> content; the name is empty where it is one file
    require: Callable[[Record], Record] | None = None  # refuses a record that does not measure what the form lists


def export(
    record: Record,
    for_: str,
    out: str | Path,
    *,
    score: str | None = None,
    kind: str | None = None,
    top: int | None = None,
    sinks: Record | None = None,
    **sizes: Unpack[StreamSizes],
) -> list[Path]:
    """Writes what a record says of heads in a form that another program reads.

        record = attnscope.load_record("needles/heads.npz")
        attnscope.export(record, "duo", "pattern")    # pattern/full_attention_heads.tsv and pattern/config.json

    Args:
        record: What was measured.
        for_: The form: "scores", "retrieval", "duo", "whisper", "whisper.cpp", "openai-whisper", "vllm-hook" or
            "alignatt".
        out: The file, or for "duo" the folder.
        score: The number or relation that ranks heads; None = what the record ranks them by.
        kind: "encoder", "decoder" or "cross"; None = the only one with this score.
        top: How many heads are listed at most; None = all that pass the record's test.
        sinks: For "duo": a record of heads on texts. Heads with equal scores are ordered by its sink shares.
        sizes: For "duo": `sink_size` and `recent_size`, how many of the first and of the latest tokens a streaming
            head keeps; 64 and 256.

    Returns:
        The files.

    Raises:
        UsageError: There is no such form or score.
        AttnscopeError: The record cannot answer, or a file cannot be written.
    """
    if for_ not in FORMATS:
        raise UsageError(f"there is no form {for_!r}", f"choose from {', '.join(FORMATS)}")
    for name, number, least in (("top", top, 1), ("sink_size", sizes.get("sink_size"), 0),
                                ("recent_size", sizes.get("recent_size"), 1)):  # fmt: skip
        if number is not None and (not isinstance(number, int) or number < least):
            raise UsageError(f"{name} is {number}", f"give a whole number from {least}")
    if sinks is not None and for_ != "duo":
        raise UsageError(f"sink shares are for duo, not for {for_}", "leave out --with")
    out, form = Path(out), FORMATS[for_]
    if form.require is not None:
        form.require(record)
    resting = None if sinks is None else scores_of(sinks, "resting_share", kind)
    files = form.write(Order(scores_of(record, score, kind), out, top, resting, **sizes))
    if "" not in files:
        with replace_together(out) as staged:
            for name, content in files.items():
                write_whole(staged / name, content)
        return [out / name for name in files]
    if is_stream(out):
        write_stream(out, files[""])
        return []
    return [write_whole(out, files[""])]


def _json(document: Any, indent: int | None = 2) -> bytes:
    return (json.dumps(plain(document, finite), indent=indent) + "\n").encode()


# Each form ------------------------------------------------------------------------------------------------------------


def _scores(order: Order) -> dict[str, bytes]:
    """A plain table, one row per head: as JSON, or as safetensors with one tensor per column."""
    scores = order.scores
    about = {
        "schema": SCHEMA, "score": scores.name, "what": scores.what, "kind": scores.kind,
        "n_layers": scores.shape[0], "n_heads": scores.shape[1], "n_kv_heads": scores.n_kv_heads,
        "run": {name: scores.run.get(name) for name in ("model", "source", "sha256", "architecture")},
        "attnscope": VERSION, "chosen": scores.chosen,
    }  # fmt: skip
    columns: dict[str, Any] = {
        "layer": [layer for layer, _ in scores.heads], "head": [head for _, head in scores.heads],
        "kv_head": [scores.kv_head(head) for _, head in scores.heads],
        "score": scores.score, "low": scores.low, "high": scores.high, scores.baseline_name: scores.baseline,
    }  # fmt: skip
    if order.out.suffix == ".safetensors":
        from safetensors.numpy import save

        full = {name: values for name, values in columns.items() if None not in list(values)}
        tensors = {name: np.ascontiguousarray(values) for name, values in full.items()}
        return {"": save(tensors, {name: json.dumps(plain(value, finite)) for name, value in about.items()})}
    if order.out.suffix not in (".json", "") and not is_stream(order.out):
        raise UsageError(f"{order.out} is no name for scores", "end it in .json or .safetensors")
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {"": _json({**about, "heads": rows}, None)}


def _retrieval(order: Order) -> dict[str, bytes]:
    """{"layer-head": [score of each test]}, on one line: readers take the mean of the list."""
    record = require_needles(order.scores.record, order.scores.name)
    n_answer = record.options.get("n_answer")
    if not isinstance(n_answer, int) or n_answer < 1:
        raise AttnscopeError("the record does not say how long its needles are", "make it again")
    tests: dict[str, list[float]] = {}
    for head in record.heads:
        values = tests.setdefault(f"{head.layer}-{head.head}", [])
        for name, estimate in head.measures.items():
            if name.startswith("retrieval_at_"):
                if not 0 <= (n_needles := estimate.count / n_answer) <= MOST_NEEDLES:
                    message = "the record does not say how many needles were read at each depth"
                    raise AttnscopeError(message, "make it again")
                values += [estimate.value] * round(n_needles)
    return {"": _json(tests, None)}


def _duo(order: Order) -> dict[str, bytes]:
    """A matrix of layers and key/value heads with tabs between, and the sizes of sink and window."""
    before = _fields_of(order.out / _CONFIG, hint := "choose another folder with --out")
    if before and "sink_size" not in before:
        raise AttnscopeError(f"{order.out / _CONFIG} belongs to something else, such as a model", hint)
    table = io.StringIO()
    np.savetxt(table, full_attention_values(order.scores, order.sinks), delimiter="\t")
    sizes = {"sink_size": order.sink_size, "recent_size": order.recent_size}
    about = {"model_name": order.scores.run.get("model"), **sizes, "attnscope": VERSION}
    return {"full_attention_heads.tsv": table.getvalue().encode(), _CONFIG: _json(about)}


def _require_relations(record: Record) -> Relations:
    if not isinstance(record, Relations):
        raise AttnscopeError(
            f"{record.record_kind().one} does not say which heads align words",
            "make one: attnscope relations aligned.jsonl -m MODEL -o FOLDER",
        )
    return record


def _require_recordings(record: Record) -> Relations:
    if not isinstance(record, Relations) or record.corpus.get("of") != RECORDINGS:
        raise AttnscopeError(
            f"{record.record_kind().one} does not say which heads listen to words",
            'make one: attnscope relations timed.jsonl -m WHISPER -o FOLDER, with {"audio", "words"} per line',
        )
    return record


def _whisper(order: Order) -> dict[str, bytes]:
    """`alignment_heads` in the JSON of a model, whose other fields stay as they are."""
    document = {
        **_fields_of(order.out, "name a generation_config.json, or a new file"),
        "alignment_heads": sorted(order.heads),
    }
    return {"": (json.dumps(document, indent=2) + "\n").encode()}  # infinity in other fields stays, too


def _fields_of(path: Path, hint: str) -> dict[str, Any]:
    """The fields of a file of JSON; none if there is no such file."""
    try:
        return {**parse_json(path.read_bytes())} if path.is_file() else {}
    except OSError as error:
        raise AttnscopeError(f"cannot read {path}: {error.strerror or error}", hint) from None
    except (ValueError, TypeError):
        raise AttnscopeError(f"{path} is no JSON with fields", hint) from None


def _whisper_cpp(order: Order) -> dict[str, bytes]:
    """An array of C, and the lines that pass it to a context."""
    heads = sorted(order.heads)
    pairs = ", ".join(f"{{{layer}, {head}}}" for layer, head in heads)
    model = one_line(str(order.scores.run.get("model")))
    lines = (
        f"// Alignment heads of {model}, found by attnscope {VERSION}.",
        f"static const whisper_ahead aheads[] = {{ {pairs} }};",
        "// params.dtw_token_timestamps = true; params.dtw_aheads_preset = WHISPER_AHEADS_CUSTOM;",
        f"// params.dtw_aheads = {{ {len(heads)}, aheads }};",
    )
    return {"": ("\n".join(lines) + "\n").encode()}


def _openai_whisper(order: Order) -> dict[str, bytes]:
    """The dump that `model.set_alignment_heads` reads: a mask (layer, head) of truth values, compressed, as text."""
    mask = np.zeros(order.scores.shape, np.bool_)
    mask[tuple(np.array(order.heads).T)] = True
    return {"": base64.b85encode(gzip.compress(mask.tobytes(), mtime=0))}


def _vllm_hook(order: Order) -> dict[str, bytes]:
    """A configuration with the heads whose queries and keys are kept."""
    scores = order.scores
    if scores.kind != "decoder":
        raise AttnscopeError(
            f"{scores.name} is of {scores.kind} attention", "vLLM-Hook watches decoders: give a record of one"
        )
    model = str(scores.run.get("model"))
    about = {
        "provider": "attn-hf", "name": model, "model_id": model,
        "note": f"Heads by {scores.name}, found by attnscope {VERSION}.",
    }  # fmt: skip
    return {
        "": _json(
            {"model_info": about, "params": {"important_heads": order.heads}, "hookq": {"hookq_mode": "all_tokens"}}
        )
    }


def _alignatt(order: Order) -> dict[str, bytes]:
    """Heads that look at the source word of what is translated, each with its share of right words."""
    scores = order.scores
    relation, accuracy = _require_relations(scores.record)[scores.name], scores.grid(scores.score)
    listed = [{"layer": layer, "head": head, "ts": float(accuracy[layer, head])} for layer, head in order.heads]
    return {
        "": _json({
            "model": scores.run.get("model"), "relation": relation.name, "kind": scores.kind,
            "num_layers": scores.shape[0], "num_heads": scores.shape[1], "num_kv_heads": scores.n_kv_heads,
            "num_sentences": relation.n_texts_scored, "total_alignable_tokens": relation.n_scored,
            "ts_threshold": relation.baseline, "ts_matrix": np.nan_to_num(accuracy), "token_alignment_heads": listed,
        })
    }  # fmt: skip


_CT2, _KVPRESS = (
    "OpenNMT/CTranslate2 converters/transformers.py 001b942",
    "NVIDIA/kvpress presses/duo_attention_press.py",
)

FORMATS = {
    "scores": Format("attnscope's own: docs/export.md", _scores),
    "retrieval": Format(
        "nightdessert/Retrieval_Head README.md, retrieval_head_detection.py 2d9fb9d", _retrieval, require_needles
    ),
    "duo": Format(f"mit-han-lab/duo-attention duo_attn/utils.py 03dca84; {_KVPRESS}", _duo, require_needles),
    "whisper": Format(f"transformers models/whisper/generation_whisper.py 5.23; {_CT2}", _whisper, _require_recordings),
    "whisper.cpp": Format("ggml-org/whisper.cpp include/whisper.h 050b23a", _whisper_cpp, _require_recordings),
    "openai-whisper": Format(
        "openai/whisper whisper/model.py set_alignment_heads 20231117", _openai_whisper, _require_recordings
    ),
    "vllm-hook": Format("IBM/vLLM-Hook model_configs/core_reranker/granite-4.0-micro.json 08030c2", _vllm_hook),
    "alignatt": Format(
        "QuentinFuxa/NoLanguageLeftWaiting nllw/alignatt.py load_heads 01eee25", _alignatt, _require_relations
    ),
}
"""By the name that `--for` takes."""

WHISPER = ("whisper", "whisper.cpp", "openai-whisper")
"""Those that list alignment heads."""
