"""A model that is not here: its queries and keys on some texts, read from files, pass the seam as any model's do."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnscope.core.attention.seam import AttentionCall, Probe
from attnscope.errors import AttnscopeError, amount
from attnscope.models.captured.files import Capture
from attnscope.models.files import file_sha256
from attnscope.models.info import ModelInfo, ShownModel
from attnscope.models.model import Batch
from attnscope.records import Tokens


class CapturedTokenizer:
    """Knows the tokens of the captured texts, and no others.

    Args:
        captures: The captures.
        by_text: Each by its text.
    """

    name = "none: the captured texts bring their tokens"
    mask_id = chat = None

    def __init__(self, captures: Sequence[Capture]) -> None:
        self._captures = captures
        self._by_text = {capture.tokens.text: capture for capture in captures}

    def ordinary_ids(self) -> list[int]:
        """None are known."""
        return []

    def spell(self, number: int) -> str:
        """The number."""
        return str(number)

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """The tokens of a captured text, or of the capture with a number, such as "0".

        Raises:
            AttnscopeError: It was not captured.
        """
        capture = self._by_text.get(text)
        if capture is None and text.isdecimal() and int(text) < len(self._captures):
            capture = self._captures[int(text)]
        if capture is None or pair is not None:
            raise AttnscopeError(
                "only captured texts can be studied, and this is none of them",
                f"give one of them, or its number from 0 to {len(self._captures) - 1}",
            )
        return capture.tokens


class CapturedModel(ShownModel):
    """Queries and keys on some texts; see models.model.Model. It answers what attention alone can answer.

    Args:
        captures: The captures, of one model.
        info: What is known of it.

    Attributes:
        info: As given.
        tokenizer: Knows the captured texts.
        texts: The captured texts, in the order of their files.
    """

    writer = eyes = ears = viewer = run_inputs = head_slices = look = probe_forwards = loss = None
    resumes = False

    def __init__(self, captures: Sequence[Capture], info: ModelInfo) -> None:
        self.info = info
        self.tokenizer = CapturedTokenizer(captures)
        self.texts = tuple(capture.tokens.text for capture in captures)
        self._by_ids = {tuple(capture.tokens.ids.tolist()): capture for capture in captures}
        self._embeddings: dict[int, Tensor] | None = None

    def run(self, batch: Batch, probe: Probe) -> Tensor:
        """Reads a batch's queries and keys, layer by layer; see models.model.Model.

        Returns:
            Zeros, (batch, token, 1): hidden states are not known.

        Raises:
            AttnscopeError: A text was not captured.
        """
        ids = batch.ids.cpu()
        lengths = [len(row) for row in ids] if batch.mask is None else batch.mask.sum(1).tolist()
        rows = [self._find(row[:length]) for row, length in zip(ids, lengths, strict=True)]
        whole = batch.mask is None or bool(batch.mask.all())
        mask = None if whole or batch.mask is None else batch.mask.cpu()[:, None, None, :]
        for calls in zip(*(row.calls() for row in rows), strict=True):
            probe(_join([call for call, _ in calls], ids.shape[1], mask))
        return torch.zeros(*ids.shape, 1)

    def modules(self) -> list[Any]:
        """There are none."""
        return []

    def blocks(self) -> dict[Any, Any]:
        """There are none."""
        return {}

    def output_projections(self) -> dict[Any, Tensor]:
        """None is known."""
        return {}

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

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise AttnscopeError(
            "captures hold queries and keys, not the model: nothing can be changed in it and run again",
            "load the model itself, or ask what attention alone answers: heads, atlas, compare, heatmap, page",
        )

    outputs = rerun = untrained = unembedding = _refuse

    def _find(self, ids: Tensor) -> Capture:
        capture = self._by_ids.get(tuple(ids.tolist()))
        if capture is None:
            raise AttnscopeError(
                f"a text of {amount(len(ids), 'token')} was not captured whole",
                "captured texts cannot be cut: no --chunk",
            )
        return capture


def _join(calls: Sequence[AttentionCall], n: int, mask: Tensor | None) -> AttentionCall:
    """One attention of several texts, filled up to n tokens."""
    first = calls[0]
    bias = None
    if first.bias is not None:
        biases = [call.bias for call in calls if call.bias is not None]
        bias = torch.cat([pad(each, (0, n - each.shape[3], 0, n - each.shape[2])) for each in biases])

    def fill(name: str) -> Tensor:
        return torch.cat([pad(getattr(call, name), (0, 0, 0, n - call.key.shape[2])) for call in calls])

    return AttentionCall(
        first.layer, first.kind, fill("query"), fill("key"), fill("value"), first.scale, mask, first.is_causal, bias,
        first.softcap, first.sinks, window=first.window,
    )  # fmt: skip


def open_captures(files: Sequence[Path], name: str) -> CapturedModel:
    """Makes a model of captures, once each stored row of weights is the one that its queries and keys give.

    Args:
        files: The files, one per text.
        name: What the user called them.

    Raises:
        AttnscopeError: A file is damaged or false, two hold the same text, or they are of different models.
    """
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
        path="seam", kinds=(header.kind,), n_layers=(header.layers[-1] + 1,),
        n_heads=(max(n for n, *_ in sizes),), n_kv_heads=(max(n for _, n, *_ in sizes),),
        d_model=max(n * d_head for n, _, d_head, _ in sizes), n_parameters=0, max_tokens=None, dtype="float32",
        device="cpu", notes=tuple(notes),
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
