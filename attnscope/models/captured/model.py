"""A model that is not here: its queries and keys on some texts, read from files, pass the seam as any model's do."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.core.attention.seam import AttentionCall, Probe
from attnscope.errors import AttnscopeError, amount
from attnscope.models.bare import BareModel, BareTokenizer
from attnscope.models.captured.files import Capture
from attnscope.models.files import file_sha256
from attnscope.models.info import ModelInfo
from attnscope.models.model import Batch
from attnscope.records import Tokens


class CapturedTokenizer(BareTokenizer):
    """Knows the tokens of the captured texts, and no others."""

    name = "none: the captured texts bring their tokens"

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._captures = captures
        self._by_text = {capture.tokens.text: capture for capture in captures}

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """The tokens of a captured text, or of the capture with a number, such as "0"."""
        capture = self._by_text.get(text)
        if capture is None and text.isdecimal() and int(text) < len(self._captures):
            capture = self._captures[int(text)]
        if capture is None or pair is not None:
            raise AttnscopeError(
                "only captured texts can be studied, and this is none of them",
                f"give one of them, or its number from 0 to {len(self._captures) - 1}",
            )
        return capture.tokens


class CapturedModel(BareModel):
    """Queries and keys on some texts; see models.model.Model. It answers what attention alone can answer."""

    _refusal = (
        "captures hold queries and keys, not the model: nothing can be changed in it and run again",
        "load the model itself, or ask what attention alone answers: heads, atlas, compare, heatmap, page",
    )
    outputs = rerun = untrained = unembedding = BareModel._refuse

    def __init__(self, captures: Sequence[Capture], info: ModelInfo) -> None:
        self.info = info
        self.tokenizer = CapturedTokenizer(captures)
        self.texts = tuple(capture.tokens.text for capture in captures)
        self._by_ids = {tuple(capture.tokens.ids.tolist()): capture for capture in captures}
        self._embeddings: dict[int, Tensor] | None = None

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Reads a batch's queries and keys, layer by layer; returns zeros, (batch, token, 1), for hidden states."""
        batch = batch.to("cpu")
        captures = [self._find(ids) for ids in batch.rows()]
        mask = None if batch.mask is None else batch.mask[:, None, None, :]
        for calls in zip(*(capture.calls() for capture in captures), strict=True):
            probe(_join([call for call, _ in calls], batch.ids.shape[1], mask))
        return torch.zeros(*batch.ids.shape, 1)

    def static_embeddings(self, ids: Tensor) -> Tensor | None:
        """The rows that captures store, (batch, token, d); None where one lacks them."""
        if self._embeddings is None:
            captures = list(self._by_ids.values())
            has_all = all(capture.d_embedding for capture in captures)
            self._embeddings = {
                number: row
                for capture in (captures if has_all else ())
                for number, row in zip(capture.tokens.ids.tolist(), capture.read_embeddings(), strict=True)
            }
        if not self._embeddings:
            return None
        padding = torch.zeros_like(next(iter(self._embeddings.values())))
        rows = [self._embeddings.get(number, padding) for number in ids.flatten().tolist()]
        return torch.stack(rows).reshape(*ids.shape, -1)

    def _find(self, ids: tuple[int, ...]) -> Capture:
        capture = self._by_ids.get(ids)
        if capture is None:
            raise AttnscopeError(
                f"a text of {amount(len(ids), 'token')} was not captured whole",
                "captured texts cannot be cut: no --chunk",
            )
        return capture


def _join(calls: Sequence[AttentionCall], n: int, mask: Tensor | None) -> AttentionCall:
    """One attention of several texts, filled up to n tokens."""
    biases = [call.bias for call in calls if call.bias is not None]
    filled: dict[str, Any] = {
        name: torch.cat([pad(getattr(call, name), (0, 0, 0, n - call.key.shape[2])) for call in calls])
        for name in ("query", "key", "value")
    }
    if biases:
        filled["bias"] = torch.cat([pad(bias, (0, n - bias.shape[3], 0, n - bias.shape[2])) for bias in biases])
    return replace(calls[0], **filled, mask=mask)


def open_captures(files: Sequence[Path], name: str) -> CapturedModel:
    """Makes a model of captures, once each stored row of weights is the one that its queries and keys give."""
    captures = [Capture(path) for path in files]
    first = captures[0]
    earlier: dict[str, Capture] = {}
    for capture in captures:
        _require_alike(first, capture)
        if (twin := earlier.setdefault(capture.tokens.text, capture)) is not capture:
            raise AttnscopeError(f"{capture.path} holds the text of {twin.path}", "leave one of them out")
    n_rows = [capture.require_true() for capture in captures]
    header, sizes = first.header, first.sizes
    unchecked = sum(n < len(header.layers) for n in n_rows)
    notes = ["Queries and keys were captured elsewhere; the model itself was not run."]
    if not unchecked:
        notes.append("Each stored row of weights equals what queries and keys give.")
    else:
        notes.append(
            f"{unchecked} of {amount(len(captures), 'capture')} lack the row of weights that shows that queries and "
            "keys are the ones the model used."
        )
    if not all(d_value for *_, d_value in first.sizes):
        notes.append("Values were not captured: measures that need them are undefined.")
    digest = hashlib.sha256("".join(file_sha256(capture.path) for capture in captures).encode()).hexdigest()
    info = ModelInfo(
        name=header.model, source=f"captures {name}", sha256=digest, architecture="captured", engine="captured",
        kinds=(header.kind,), n_layers=(header.layers[-1] + 1,), n_heads=(max(n for n, *_ in sizes),),
        n_kv_heads=(max(n for _, n, *_ in sizes),), d_model=max(n * d_head for n, _, d_head, _ in sizes),
        n_parameters=0, notes=tuple(notes),
    )  # fmt: skip
    return CapturedModel(captures, info)


def _require_alike(first: Capture, other: Capture) -> None:
    """Refuses captures of another model, or of other layers."""
    for name in ("model", "kind", "layers", "scales", "windows", "softcaps"):
        values = getattr(first.header, name), getattr(other.header, name)
        if values[0] != values[1]:
            message = f"{first.path} and {other.path} have different {name}: {values[0]!r} and {values[1]!r}"
            raise AttnscopeError(message, "give captures of one model, of the same layers, at once")
    if (first.sizes, first.d_embedding) != (other.sizes, other.d_embedding):
        message = f"{first.path} and {other.path} differ in heads, widths, values or embeddings"
        raise AttnscopeError(message, "give captures of one model at once")
