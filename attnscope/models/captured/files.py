"""The files of captures: one safetensors file per text, with each layer's queries and keys after position encoding."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from attnscope.corpus.formats import LARGEST_ID
from attnscope.corpus.texts import expand
from attnscope.errors import AttnscopeError, amount, first_line, parse_json
from attnscope.records import Tokens
from attnscope.records.frame.checks import require_types
from attnscope.records.frame.codec import build
from attnscope.text import build_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.seam import AttentionCall

HEADER = "attnscope_capture"
"""The key of a file's metadata that holds the header, as JSON."""
VERSION = 1


@dataclass(frozen=True)
class Header:
    """What the metadata of a capture say, as `CapturedText` describes it; what is not known is empty.

    Scales, windows and soft caps are per layer, None = a layer has none; `layers` are the numbers of those that have
    attention. `query` is the place of the query whose row of weights is stored.
    """

    model: str
    kind: Literal["encoder", "decoder"]
    layers: tuple[int, ...]
    scales: tuple[float, ...]
    windows: tuple[int | None, ...] = ()
    softcaps: tuple[float | None, ...] = ()
    text: str = ""
    pieces: tuple[str, ...] = ()
    offsets: tuple[tuple[int, int], ...] = ()
    special: tuple[int, ...] = ()
    query: int = 0
    version: int = VERSION

    def __post_init__(self) -> None:
        require_types(self, "its header")
        n = len(self.layers)
        if self.version != VERSION:
            raise ValueError(f"its form has version {self.version!r}, and this attnscope reads version {VERSION}")
        if not n or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError("its layers must be numbers from 0, each once, in ascending order")
        if len(self.scales) != n or not all(math.isfinite(scale) and scale > 0 for scale in self.scales):
            raise ValueError(f"its scales must be {n} positive numbers, one per layer")
        for name, values in (("windows", self.windows), ("softcaps", self.softcaps)):
            if len(values) not in (0, n) or not all(value is None or value > 0 for value in values):
                raise ValueError(f"its {name} must be {n} positive numbers or null, one per layer")

    @classmethod
    def read(cls, content: str) -> "Header":
        """The header of a file's metadata."""
        fields = parse_json(content)
        if not isinstance(fields, dict):
            raise ValueError("its header is no JSON object")
        try:
            header: Header = build(cls, fields)
        except KeyError as error:
            raise ValueError(f"its header lacks the field {error}") from error
        return header


class Capture:
    """One file: the queries and keys of a model on one text. They are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            try:
                self.header = Header.read((file.metadata() or {}).get(HEADER, "null"))
                self._shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                self._require_tensors()
                self.tokens = self._read_tokens(file.get_tensor("tokens").tolist())
            except (ValueError, TypeError) as error:
                raise AttnscopeError(f"{path} is no capture: {error}", "docs/captured.md has the form") from error

    @contextmanager
    def _open(self) -> Iterator[Any]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            message = f"cannot read the capture {self.path}: {first_line(error)}"
            raise AttnscopeError(message, "write it again") from error

    @property
    def sizes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Per layer: query heads, key/value heads, and the widths of a head's queries and values (0 = not stored)."""
        shapes = [
            [self._shapes.get(f"layers.{layer}.{name}", (0, 0, 0)) for name in ("query", "key", "value")]
            for layer in self.header.layers
        ]
        return tuple((query[0], key[0], query[2], value[2]) for query, key, value in shapes)

    @property
    def d_embedding(self) -> int:
        """The width of static embeddings; 0 = they are not stored."""
        return int(self._shapes.get("embeddings", (0, 0))[1])

    def read_embeddings(self) -> "Tensor":
        """The static embeddings, (token, d), float32."""
        with self._open() as file:
            embeddings: Tensor = file.get_tensor("embeddings").float()
        return embeddings

    def calls(self) -> "Iterator[tuple[AttentionCall, Tensor | None]]":
        """Each layer's attention, and its stored row of weights, (head, key), if there is one.

        Values that are not stored have no width.
        """
        import torch

        from attnscope.core.attention.seam import AttentionCall

        header, n = self.header, len(self.tokens)
        with self._open() as file:
            for place, layer in enumerate(header.layers):
                query, key = (file.get_tensor(f"layers.{layer}.{part}") for part in ("query", "key"))
                names = [f"layers.{layer}.{part}" for part in ("value", "bias", "sinks", "weights")]
                value, bias, sinks, weights = (file.get_tensor(n) if n in self._shapes else None for n in names)
                if bias is not None:  # by offset: key - query is -(n - 1) to n - 1
                    bias = bias.float()[:, torch.arange(n) - torch.arange(n)[:, None] + n - 1][None]
                call = AttentionCall(
                    layer, header.kind, query[None].float(), key[None].float(),
                    torch.zeros(1, len(key), n, 0) if value is None else value[None].float(), header.scales[place],
                    is_causal=header.kind == "decoder", bias=bias,
                    softcap=header.softcaps[place] if header.softcaps else None,
                    window=header.windows[place] if header.windows else None,
                    sinks=None if sinks is None else sinks.float(),
                )  # fmt: skip
                yield call, weights

    def require_true(self) -> int:
        """How many layers store a row of weights; each must be the one that queries and keys give."""
        import torch

        from attnscope.core.attention.pooling import part_of_weights

        n, place, n_rows = len(self.tokens), self.header.query, 0
        for call, stored in self.calls():
            if stored is None:
                continue
            n_rows += 1
            row, expected = part_of_weights(call, slice(place, place + 1), slice(0, n))[0, :, 0], stored.float()
            largest = float(call.query[0, :, place].norm(dim=-1).max() * call.key[0].norm(dim=-1).max()) * call.scale
            rounding = 1e-4 + torch.finfo(stored.dtype).eps * (1 + largest)
            if not float((row - expected).abs().max()) <= rounding:
                raise AttnscopeError(
                    f"{self.path}, layer {call.layer}: its queries and keys give other weights than it stores",
                    _reason(row, expected, call.scale),
                )
        return n_rows

    def _require_tensors(self) -> None:
        n = self._shapes.get("tokens", (0,))[0]
        if not n:
            raise ValueError("it has no tensor named tokens, or an empty one")
        embeddings = self._shapes.get("embeddings", (n, 0))
        if len(embeddings) != 2 or embeddings[0] != n:
            raise ValueError(f"embeddings must be ({n}, d); they are {embeddings}")
        for layer in self.header.layers:
            name = f"layers.{layer}"
            shapes = {part: self._shapes.get(f"{name}.{part}") for part in ("query", "key", "value", "bias", "weights")}
            query, key = shapes["query"], shapes["key"]
            if query is None or key is None:
                raise ValueError(f"{name}.{'query' if query is None else 'key'} is missing")
            if len(query) != 3 or len(key) != 3 or query[1] != n or key[1] != n or query[2] != key[2]:
                raise ValueError(f"{name}: queries and keys must be (head, {n}, d_head); they are {query} and {key}")
            if not key[0] or query[0] % key[0]:
                raise ValueError(f"{name}: {query[0]} query heads are not a multiple of {key[0]} key heads")
            for part, shape in (
                ("value", (*key[:2], (shapes["value"] or (0,))[-1])),
                ("bias", (query[0], 2 * n - 1)),
                ("weights", (query[0], n)),
            ):
                if shapes[part] not in (None, shape):
                    raise ValueError(f"{name}.{part} must be {shape}; it is {shapes[part]}")

    def _read_tokens(self, ids: list[int]) -> Tokens:
        header, n = self.header, len(ids)
        for name, values in (("pieces", header.pieces), ("offsets", header.offsets)):
            if len(values) not in (0, n):
                raise ValueError(f"it has {amount(n, 'token')} and {len(values)} {name}")
        if not all(0 <= place < n for place in (header.query, *header.special)):
            raise ValueError(f"it names places of tokens that are not among its {n}")
        if min(ids) < 0 or max(ids) > LARGEST_ID:
            raise ValueError(f"token numbers must be 0 to {LARGEST_ID:,}")
        pieces = header.pieces or tuple(f"#{number}" for number in ids)
        special = [place in set(header.special) for place in range(n)]
        return build_tokens(
            header.text or " ".join(pieces), ids=ids, pieces=pieces, offsets=header.offsets or None, special=special
        )


def _reason(row: "Tensor", stored: "Tensor", scale: float) -> str:
    """What may be wrong with a capture, from one row of weights of each head, (head, key)."""
    import torch

    seen = (row > 1e-6) & (stored > 1e-6)
    if bool((stored[row == 0] > 1e-3).any()):
        return "the stored row attends to keys that this one may not see: is the model an encoder, or its window wider?"
    if bool((row[stored == 0] > 1e-3).any()):
        return "the stored row gives nothing to keys that this one may see: is the model a decoder, or has it a window?"
    if bool((stored.sum(-1) - 1).abs().max() > 0.02):
        return "the stored row does not sum to 1: are there attention sinks (layers.N.sinks)?"
    logs = [torch.log(weights).where(seen, 0.0) for weights in (row, stored)]
    centred = [log - (log.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)) for log in logs]
    x, y = (log[seen] for log in centred)
    factor = float((x * y).sum() / (x * x).sum().clamp(min=1e-30))
    fits = float((y - factor * x).abs().max()) < 1e-2 * max(1.0, float(y.abs().max()))
    if factor > 0 and abs(factor - 1) > 1e-3 and fits:
        return f"the scale is wrong: the weights fit {scale * factor:.4g} instead of {scale:.4g}"
    return "take queries and keys after position encoding (rotary) and norms, and both of the same layer"


def files_of(spec: str) -> tuple[Path, ...]:
    """The captures that a model's name means: a pattern, a file, or a folder without config.json; else none."""
    with suppress(OSError, RuntimeError, ValueError):
        path = Path(spec).expanduser()
        if path.is_dir():
            files = () if (path / "config.json").exists() else tuple(sorted(path.glob("*.safetensors")))
        else:
            files = tuple(map(Path, expand([spec]))) if spec.endswith(".safetensors") else ()
        return files if files and is_capture(files[0]) else ()
    return ()


def is_capture(path: Path) -> bool:
    """Whether a safetensors file says that it is a capture."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return HEADER in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False
