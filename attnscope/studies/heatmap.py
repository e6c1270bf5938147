"""What does every head attend to on this text? A model and a text in, a Heatmap out."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from attnscope import __version__
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Batch, ChatTokenizer, Model, ModelInfo, Sees, Writer
from attnscope.records import AttentionMap, Heatmap, Tokens, spans
from attnscope.records.pictures import Picture
from attnscope.records.pooled import PooledHeatmap
from attnscope.studies.overflow import refusal
from attnscope.text import require_text

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention import Kind, Probe
    from attnscope.core.probes import Weights


@dataclass(frozen=True)
class Choice:
    """Which heads are asked for.

    Attributes:
        layers: Numbers of layers; None = all.
        heads: Numbers of heads, in each of those layers; None = all.
        pick: Single heads as (layer, head), instead of the other two.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    pick: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        if self.pick is not None and (self.layers is not None or self.heads is not None):
            raise UsageError("heads are chosen either singly or by layers and heads", "give --pick, or -L and -H")

    def within(self, info: ModelInfo) -> Chosen:
        """The heads that are meant of a model.

        Raises:
            AttnscopeError: The model has no such layer or head; says how many there are.
        """
        n_layers, n_heads = max(info.n_layers), max(info.n_heads)
        layers = tuple(layer for layer, _ in self.pick) if self.pick is not None else self.layers
        heads = tuple(head for _, head in self.pick) if self.pick is not None else self.heads
        for what, asked, n in (("layer", layers, n_layers), ("head", heads, n_heads)):
            beyond = [number for number in asked or () if not 0 <= number < n]
            if beyond:
                raise AttnscopeError(
                    f"there is no {what} {beyond[0]}: {info.name} has {n} {what}s", f"they are numbered 0 to {n - 1}"
                )
            if asked is not None and not asked:
                raise UsageError(f"no {what} is chosen", f"they are numbered 0 to {n - 1}")
        return Chosen(
            tuple(sorted(set(range(n_layers) if layers is None else layers))),
            tuple(sorted(set(range(n_heads) if heads is None else heads))),
            None if self.pick is None else tuple(dict.fromkeys(self.pick)),
        )


@dataclass(frozen=True)
class Chosen:
    """The heads of a model that are kept: a block of layers x heads, and which of it are shown (None = all)."""

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    picked: tuple[tuple[int, int], ...] | None


Span = tuple[int, int | None]
"""Numbers from a first one up to, but without, another (None = the end): as a Python slice."""


@dataclass(frozen=True)
class Cut:
    """Which part of a map is asked for.

    Attributes:
        rows: Which queries; None = all.
        cols: Which keys; None = all.
    """

    rows: Span | None = None
    cols: Span | None = None

    def __post_init__(self) -> None:
        for name, span in (("rows", self.rows), ("cols", self.cols)):
            if span is not None and (span[0] < 0 or (span[1] is not None and span[1] <= span[0])):
                stop = "" if span[1] is None else span[1]
                raise UsageError(
                    f"{name} {span[0]}:{stop} hold no token", "from:to goes up and counts from 0, such as 1000:1064"
                )

    def __bool__(self) -> bool:
        return self.rows is not None or self.cols is not None

    def within(self, n_queries: int, n_keys: int) -> tuple[slice, slice]:
        """The queries and keys that are meant of a map.

        Raises:
            UsageError: It has no such tokens; says how many there are.
        """
        found = []
        for name, span, n in (("rows", self.rows, n_queries), ("cols", self.cols, n_keys)):
            start, stop = span or (0, None)
            stop = n if stop is None else stop
            if stop > n or start >= n:
                raise UsageError(f"{name} {start}:{stop} reach beyond the text's {n} tokens", f"they are 0:{n} at most")
            found.append(slice(start, stop))
        return found[0], found[1]


@dataclass(frozen=True)
class Prompt:
    """A text, and how a model is to read it.

    Attributes:
        text: The text.
        pair: A second text, for models that read pairs.
        target: What the decoder of an encoder-decoder is to write; None = its own greedy output.
        chat: Whether the text is put into the model's chat template, as the user's message.
        generate: How many tokens a decoder is to write after the text.
    """

    text: str
    pair: str | None = None
    target: str | None = None
    chat: bool = False
    generate: int = 0

    def __post_init__(self) -> None:
        named = (("the text", self.text), ("the second text", self.pair), ("the target", self.target))
        for name, text in named:
            if text is not None:
                require_text(text, name)


@dataclass(frozen=True)
class Reading:
    """What a model reads: tokens, those of its decoder where it has an encoder too, and notes on them.

    Of what is no text also what the model's forward gets, and the picture that the tokens are patches of.
    """

    tokens: Tokens
    target: Tokens | None = None
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, Any] | None = None
    picture: Picture | None = None


def heatmap(
    model: Model,
    text: str,
    *,
    pair: str | None = None,
    target: str | None = None,
    chat: bool = False,
    generate: int = 0,
    layers: int | Sequence[int] | None = None,
    heads: int | Sequence[int] | None = None,
    pick: Sequence[tuple[int, int]] | None = None,
    hide_special: bool = False,
    words: bool = False,
    rows: Span | slice | None = None,
    cols: Span | slice | None = None,
) -> Heatmap:
    """Runs a model on a text and keeps the attention weights of the chosen heads.

    Args:
        model: A loaded model, see `attnscope.load`.
        text: What to run it on.
        pair: A second text, for models that read pairs.
        target: What the decoder of an encoder-decoder is to write; None = its own greedy output.
        chat: Puts the text into the model's chat template, as the user's message.
        generate: Lets a decoder write that many tokens after the text, and shows what it attended to as it wrote.
        layers: Numbers of the layers to keep; None = all.
        heads: Numbers of the heads to keep in those layers; None = all.
        pick: Single heads to keep, as (layer, head), instead of layers and heads.
        hide_special: Leaves special tokens out and divides each row by what is left of it.
        words: Merges word pieces: sums over keys, means over queries (Clark et al. 2019, section 4.1).
        rows: Keeps these queries alone, as (first, last + 1) or a slice: in memory of their number, whatever the text's
            length.
        cols: Keeps these keys alone, likewise. Weights stay what they are in the whole map.

    Returns:
        The record; `weights` is (layer, head, query, key). For long texts see `pooled_heatmap`.

    Raises:
        AttnscopeError: An empty text, a layer or head that the model does not have, something that the model cannot
            do, not enough memory.

    Warns:
        UserWarning: What was read is not just what was given: a text was cut, or a target was written by the model.
    """
    require_call(model, text, pick)
    chosen = choice_from(layers, heads, pick).within(model.info)
    reading = read(model, Prompt(text, pair, target, chat, generate))
    for note in reading.notes:
        warnings.warn(note, stacklevel=2)
    cut = Cut(_span(rows), _span(cols))
    record = observed(model, outline(model.info, reading, chosen, text, cut), reading)
    return changed(record, hide_special=hide_special, words=words)


def read(model: Model, prompt: Prompt) -> Reading:
    """Tokenises a prompt as a model reads it; texts over its limit are cut, which a note says.

    Raises:
        AttnscopeError: The text is empty, or the prompt asks for what the model cannot do.
    """
    limit = model.info.max_tokens
    if prompt.chat:
        if not isinstance(model.tokenizer, ChatTokenizer):
            raise AttnscopeError(f"{model.info.name} has no chat template", "leave out --chat")
        if prompt.pair is not None:
            raise AttnscopeError("a chat message is one text", "leave out --pair or --chat")
        tokens, cut = fitted(model.tokenizer.chat(prompt.text), limit)
    else:
        tokens, cut = fitted(model.tokenizer.encode(prompt.text, prompt.pair), limit)
    notes: tuple[str, ...] = (cut,) if cut else ()
    if "encoder" in model.info.kinds and "decoder" in model.info.kinds:
        target, note = _target(model, tokens, prompt)
        return Reading(tokens, target, (*notes, note) if note else notes)
    if prompt.target is not None:
        raise AttnscopeError(f"{model.info.name} is no encoder-decoder, so it has no target", "leave out --target")
    if prompt.generate:
        if not isinstance(model, Writer):
            raise AttnscopeError(f"{model.info.name} cannot continue a text", "leave out --generate, or name a decoder")
        tokens = model.generate_tokens(tokens, prompt.generate)
        written = len(tokens) - tokens.n_given
        if written < prompt.generate:
            notes += (f"the model wrote {written} of {prompt.generate} tokens: it ended the text or reached its limit",)
    return Reading(tokens, None, notes)


def _target(model: Model, tokens: Tokens, prompt: Prompt) -> tuple[Tokens, str]:
    """What the decoder beside an encoder reads, and a note on it."""
    if prompt.generate:
        raise AttnscopeError(f"{model.info.name} answers a text rather than continue it", "leave out --generate")
    if not isinstance(model, Writer):
        raise AttnscopeError(f"{model.info.name} has a decoder, but nothing that it could read")
    if prompt.target is not None:
        return fitted(model.encode_target(prompt.target), model.info.max_tokens)
    target = model.greedy_target(tokens)
    answer = target.text if target.text.strip() else "nothing"
    return target, f"no target was given: the decoder reads what the model itself writes, “{answer}”"


def changed(record: Heatmap, *, hide_special: bool, words: bool) -> Heatmap:
    """The record with special tokens hidden, then word pieces merged, as asked for."""
    record = record.hide_special() if hide_special else record
    return record.merge_words() if words else record


def fitted(tokens: Tokens, limit: int | None) -> tuple[Tokens, str]:
    """The tokens, cut to what a model takes, and a sentence that says so ("" if nothing was cut).

    The first tokens stay, and all special ones; of a pair, the longer text is cut first.

    Raises:
        AttnscopeError: There are no tokens but special ones.
    """
    ordinary = np.flatnonzero(~tokens.special)
    if not len(ordinary):
        raise AttnscopeError("there is no text: its tokens are all special ones", "give a text with words in it")
    if limit is None or len(tokens) <= limit:
        return tokens, ""
    room = limit - int(tokens.special.sum())
    if room < 1:
        raise AttnscopeError(f"the model takes {limit} tokens, which its special tokens fill alone")
    parts = [ordinary[tokens.segments[ordinary] == segment] for segment in (0, 1)]
    shares = [len(part) for part in parts]
    shorter = min(shares[1], room // 2) if shares[1] <= shares[0] else room - min(shares[0], room - room // 2)
    kept = [parts[0][: room - shorter], parts[1][:shorter]] if shares[1] else [parts[0][:room]]
    places = np.sort(np.concatenate([*kept, np.flatnonzero(tokens.special)]))
    shown = (
        " and ".join(
            f"the first {len(k)} of {n} tokens of the {which} text"
            for k, n, which in zip(kept, shares, ("first", "second"), strict=False)
        )
        if shares[1]
        else f"the first {room} of {len(ordinary)} tokens of the text"
    )
    return tokens.take(places), (
        f"the text has {len(tokens)} tokens, the model takes {limit}: {shown} are shown, the rest is left out"
    )


def outline(info: ModelInfo, reading: Reading, chosen: Chosen, text: str, cut: Cut | None = None) -> Heatmap:
    """The record as it will be, without weights: enough to draw everything but the maps.

    Raises:
        AttnscopeError: A part is asked for that the text does not have, or of several maps.
    """
    if cut and len(info.kinds) > 1:
        raise AttnscopeError(
            f"{info.name} has {len(info.kinds)} kinds of attention, whose rows and columns differ",
            "leave out --rows and --cols",
        )
    maps, notes = [], list(reading.notes)
    for number, kind in enumerate(info.kinds):
        layers = tuple(layer for layer in chosen.layers if layer < info.n_layers[number])
        heads = tuple(head for head in chosen.heads if head < info.n_heads[number])
        if not layers or not heads:
            continue
        # A decoder beside an encoder reads the target; alone it reads the text.
        queries = reading.tokens if kind == "encoder" or reading.target is None else reading.target
        keys = reading.target if kind == "decoder" and reading.target is not None else reading.tokens
        part = None
        if cut:
            rows, cols = cut.within(len(queries), len(keys))
            part = (rows.start, cols.start, len(queries), len(keys))
            notes.append(
                f"a part of the map: queries {rows.start} to {rows.stop - 1} and keys {cols.start} to {cols.stop - 1} "
                f"of {len(keys)} tokens; weights are those of the whole"
            )
            places = np.arange(len(queries))
            queries, keys = queries.take(places[rows]), keys.take(places[cols])
        maps.append(
            AttentionMap(
                kind=kind,
                layers=layers,
                heads=heads,
                weights=np.zeros((len(layers), len(heads), 0, 0), np.float32),
                queries=queries,
                keys=keys,
                n_layers=info.n_layers[number],
                n_heads=info.n_heads[number],
                n_kv_heads=info.n_kv_heads[number],
                part=part,
            )
        )
    return Heatmap(text, tuple(maps), run_of(info, notes), picked=chosen.picked, picture=reading.picture)


def batch_of(reading: Reading, device: str) -> Batch:
    """What is read as a model takes it, a batch of one text."""
    import torch

    def row(numbers: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        return torch.as_tensor(numbers.astype(np.int64), device=device)[None]

    return Batch(
        ids=row(reading.tokens.ids),
        segments=row(reading.tokens.segments),
        target_ids=None if reading.target is None else row(reading.target.ids),
    )


def observed(
    model: Model, record: Heatmap, reading: Reading, probe_of: Callable[..., Weights] | None = None
) -> Heatmap:
    """The outlined record with the weights that the model has on what it reads.

    Args:
        model: The model.
        record: What `outline` says of it.
        reading: What it reads.
        probe_of: Makes the probe, from the arguments of `core.probes.Weights`; None = that one.

    Raises:
        AttnscopeError: The maps would not fit into memory, or the model computes NaN.
    """
    _require_memory(record)
    from attnscope.core.probes import Part, Weights

    whole = all(len(m.heads) == m.n_heads for m in record.maps)
    layers = sorted({layer for m in record.maps for layer in m.layers})
    # Layers may differ in how many heads they have; only a true choice of heads is the probe's business.
    heads = None if whole or len(record.maps) > 1 else record.maps[0].heads
    kinds = tuple(cast("Kind", m.kind) for m in record.maps)
    part = _slices_of(record.maps[0])
    if part is not None and model.info.road == "seam":
        probe: Part | Weights = Part(*part, layers, heads, kinds)
    else:
        probe = (probe_of or Weights)(layers=layers, heads=heads, kinds=kinds)
    run_on(model, reading, probe)
    maps = [_filled(m, probe.maps.get(cast("Kind", m.kind), {}), probe.heads, model.info) for m in record.maps]
    return replace(record, maps=tuple(maps))


def run_on(model: Model, reading: Reading, probe: Probe) -> None:
    """Runs a model on what it reads, with the probe at the seam."""
    import torch

    with torch.inference_mode():
        if reading.inputs is not None and isinstance(model, Sees):
            model.run_inputs(reading.inputs, probe)
        else:
            model.run(batch_of(reading, model.info.device), probe)


def _slices_of(attention: AttentionMap) -> tuple[slice, slice] | None:
    """Which queries and keys a map holds of the whole; None = all."""
    if attention.part is None:
        return None
    q, k = attention.part[:2]
    return slice(q, q + len(attention.queries)), slice(k, k + len(attention.keys))


def _filled(
    attention: AttentionMap, by_layer: Mapping[int, Tensor], kept: Sequence[int] | None, info: ModelInfo
) -> AttentionMap:
    """The map with its weights; without layers that have no attention, and with NaN for heads that a layer lacks."""
    layers = tuple(layer for layer in attention.layers if layer in by_layer)
    if not layers:
        raise AttnscopeError(
            f"no attention in layers {spans(attention.layers)}: this model has none there", "choose other layers"
        )
    shape = (len(layers), len(attention.heads), len(attention.queries), len(attention.keys))
    filled = np.full(shape, np.nan, np.float32)
    for place, layer in enumerate(layers):
        weights = by_layer[layer][0].numpy()
        part = _slices_of(attention)
        if part is not None and weights.shape[1:] != shape[2:]:  # a model off the seam gives whole maps
            weights = weights[:, part[0], part[1]]
        if np.isnan(weights).any():
            raise refusal(info, (attention.kind, layer))
        for row, head in enumerate(attention.heads):
            at = head if kept is None else kept.index(head)
            if at < weights.shape[0]:
                filled[place, row] = weights[at]
    return replace(attention, layers=layers, weights=filled)


def run_of(info: ModelInfo, notes: Sequence[str] = ()) -> dict[str, Any]:
    """What made a record, as plain JSON values."""
    return {
        "model": info.name,
        "source": info.source,
        "sha256": info.sha256,
        "architecture": info.architecture,
        "engine": info.engine,
        "road": info.road,
        "dtype": info.dtype,
        "device": info.device,
        "checked": info.checked,
        "n_parameters": info.n_parameters,
        "seed": None,
        "versions": dict(versions()),
        "notes": [*info.notes, *notes],
        **({"adapter": info.adapter, "adapter_sha256": info.adapter_sha256} if info.adapter else {}),
    }


@cache
def versions() -> tuple[tuple[str, str], ...]:
    """The versions that numbers depend on, by name."""
    return (
        ("attnscope", __version__),
        ("python", platform.python_version()),
        *((name, version(name)) for name in ("torch", "transformers", "tokenizers", "numpy")),
    )


def fingerprint(record: Heatmap | PooledHeatmap, **options: Any) -> str:
    """Eight hex digits of a record's text, model and choices, and of further options: the same for the same figures."""
    first = record.maps[0]
    told = [
        record.text,
        [list(m.queries.ids.tolist()) for m in record.maps],
        [record.run[name] for name in ("model", "sha256", "engine", "dtype")],
        [[m.kind, m.layers, m.heads] for m in record.maps],
        record.picked,
        record.changes if isinstance(record, Heatmap) else record.pool,
        first.keys.pair,
        sorted(options.items()),
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:8]


def _require_memory(record: Heatmap) -> None:
    """Refuses maps that could not be held, before the model runs for minutes."""
    needed = sum(4 * len(m.layers) * len(m.heads) * len(m.queries) * len(m.keys) for m in record.maps)
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system: the allocation itself will tell
        return
    if needed * 2 > available:
        first = record.maps[0]
        raise AttnscopeError(
            f"the maps of layers {spans(first.layers)} and heads {spans(first.heads)} on {len(first.keys)} tokens "
            f"need {needed / 2**30:.0f} GiB, this machine has {available / 2**30:.0f} GiB",
            "choose fewer layers and heads (-L, -H, --pick), a part (--rows, --cols), or --pooled 256",
        )


def _span(given: Span | slice | None) -> Span | None:
    if isinstance(given, slice):
        if given.step not in (None, 1):
            raise UsageError("rows and cols are taken one after another", "leave out the step")
        return given.start or 0, given.stop
    return None if given is None else (int(given[0]), None if given[1] is None else int(given[1]))


def choice_from(
    layers: int | Sequence[int] | None, heads: int | Sequence[int] | None, pick: Sequence[tuple[int, int]] | None
) -> Choice:
    """The choice that a Python user names, of layers and heads one or several."""
    return Choice(_numbers(layers), _numbers(heads), None if pick is None else tuple(pick))


def _numbers(given: int | Sequence[int] | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    return (given,) if isinstance(given, int) else tuple(int(number) for number in given)


def require_call(model: object, text: object, pick: object) -> None:
    """Refuses what a Python user is likely to hand over by mistake, before it fails somewhere deep down."""
    if isinstance(model, str):
        raise AttnscopeError(f"{model!r} is a name, not a model", f"load it first: attnscope.load({model!r})")
    if not isinstance(text, str):
        raise AttnscopeError(f"a text is one string, not {type(text).__name__}", "call heatmap once for each text")
    if pick is None:
        return
    pairs = tuple(pick) if isinstance(pick, Iterable) and not isinstance(pick, str) else (pick,)
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise AttnscopeError(f"{pick!r} picks no heads", "give pairs of layer and head, such as [(3, 1), (5, 11)]")
