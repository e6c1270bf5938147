"""Writing captures: what a model computed on one text, for `attnscope.load`."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from attnscope.errors import AttnscopeError, first_line
from attnscope.models.captured.files import HEADER, Capture, Header
from attnscope.records.frame.storage import write_whole


@dataclass(frozen=True, eq=False, kw_only=True)
class CapturedText:
    """The queries and keys that a model computed on one text; `save` writes them for `attnscope.load`.

        text = attnscope.CapturedText(model="my-llama", kind="decoder", ids=ids, queries=queries, keys=keys,
                                      scale=head_size**-0.5, rows=rows)
        text.save("run/0.safetensors")

    Arrays are torch's or NumPy's.

    Attributes:
        model: What to call the model.
        kind: "decoder" where each query sees itself and what is before it, "encoder" where it sees the whole text.
        ids: The token numbers, (token,).
        queries: Layer -> queries after norms and position encoding, (n_heads, token, d_head), torch or NumPy.
        keys: Likewise keys, (n_kv_heads, token, d_head).
        scale: The factor on the dot products, usually 1 / sqrt(d_head); or one per layer.
        values: Likewise values, (n_kv_heads, token, d_value); without them value-weighted measures are undefined.
        rows: Layer -> the weights of one query, (n_heads, key), as the model computed them: the check that queries and
            keys are the right ones.
        query: The place of that query; None = the one in the middle, n // 2: of the last one causality does not show.
        biases: Layer -> what is added to the scaled scores, (n_heads, 2 token - 1), by key minus query from
            -(token - 1) on: ALiBi, T5.
        sinks: Layer -> one extra score per head, (n_heads,), that takes weight and gives no value.
        windows: Layer -> how many tokens a query sees back, itself included.
        softcaps: Layer -> the soft cap of the scaled scores.
        embeddings: Static embeddings of the tokens, (token, d), which some measures need.
        text: The text.
        pieces: Each token as the vocabulary writes it.
        offsets: First and last + 1 character of each token in the text.
        special: Places of special tokens.
    """

    model: str
    kind: Literal["encoder", "decoder"]
    ids: Sequence[int]
    queries: Mapping[int, Any]
    keys: Mapping[int, Any]
    scale: float | Mapping[int, float]
    values: Mapping[int, Any] = field(default_factory=dict)
    rows: Mapping[int, Any] = field(default_factory=dict)
    query: int | None = None
    biases: Mapping[int, Any] = field(default_factory=dict)
    sinks: Mapping[int, Any] = field(default_factory=dict)
    windows: Mapping[int, int | None] = field(default_factory=dict)
    softcaps: Mapping[int, float | None] = field(default_factory=dict)
    embeddings: Any = None
    text: str = ""
    pieces: Sequence[str] = ()
    offsets: Sequence[tuple[int, int]] = ()
    special: Sequence[int] = ()

    def save(self, path: str | Path) -> Path:
        """Writes the file, once queries and keys are known to give the stored rows of weights.

        Args:
            path: The file, ending in .safetensors.

        Returns:
            The file.

        Raises:
            AttnscopeError: Something does not fit, or a row of weights is another; the file is not written then.
        """
        import torch
        from safetensors.torch import save

        parts = {
            "query": self.queries, "key": self.keys, "value": self.values, "bias": self.biases, "sinks": self.sinks,
            "weights": self.rows,
        }  # fmt: skip
        arrays = {f"layers.{layer}.{name}": array for name, of in parts.items() for layer, array in of.items()}
        arrays |= {"tokens": list(self.ids)} | ({} if self.embeddings is None else {"embeddings": self.embeddings})
        tensors = {name: torch.as_tensor(array).detach().cpu().contiguous() for name, array in arrays.items()}
        content = save(tensors, {HEADER: json.dumps(asdict(self._header()))})
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "draft.safetensors"
            draft.write_bytes(content)
            Capture(draft).require_true()
        return write_whole(Path(path), content)

    def _header(self) -> Header:
        layers = tuple(sorted(self.queries))
        scales = self.scale if isinstance(self.scale, Mapping) else dict.fromkeys(layers, self.scale)

        def per_layer(numbers: Mapping[int, Any]) -> tuple[Any, ...]:
            return tuple(numbers.get(layer) for layer in layers) if numbers else ()

        try:
            return Header(
                self.model, self.kind, layers, tuple(float(scales[layer]) for layer in layers),
                per_layer(self.windows), per_layer(self.softcaps), self.text, tuple(self.pieces),
                tuple((int(start), int(end)) for start, end in self.offsets), tuple(map(int, self.special)),
                len(self.ids) // 2 if self.query is None else self.query,
            )  # fmt: skip
        except (ValueError, KeyError, TypeError) as error:
            raise AttnscopeError(f"this is no capture: {first_line(error)}", "docs/captured.md has the form") from error
