"""From texts and saved records to one page: a model runs on each text, and what the page shows is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from attnscope.choice import Choice, Tokens
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.output import HOME
from attnscope.pages import PAGE_SCHEMA, Page, PageText, page_of, require_room
from attnscope.pages.heads import heads_of
from attnscope.questions.arrays import load_arrays
from attnscope.questions.atlas import Atlas
from attnscope.questions.heads import Heads
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.results.file_sets import require_writable
from attnscope.results.kinds import KINDS, file_of
from attnscope.results.reading import schema_of
from attnscope.results.storage import PAGE_MARK, is_stream, require_replaceable, write_stream, write_whole
from attnscope.senses.photos import Photo, read_photo
from attnscope.studies.inputs.options import LoadOptions, ReadingOptions, TextsWanted
from attnscope.studies.inputs.provenance import fingerprint
from attnscope.studies.inputs.reading import Given, Prompt, PromptOptions, View, read, reader_of
from attnscope.studies.inputs.texts import Progress, Report, share_read
from attnscope.studies.maps.study import fill_maps, outline, run_model
from attnscope.text import read_text, slug

if TYPE_CHECKING:
    from torch import Tensor

SCALES = ("fixed", "head", "figure")


@dataclass(frozen=True)
class PageOrder:
    """What a page is made of, and how it opens.

    Attributes:
        texts: Texts to run the model on; "-" reads one from stdin.
        several: Files with more of them.
        reading: How texts are read.
        images: Photos. A model that reads pictures among words is given all of them before each text. Without a text, a
            vision model sees each by itself, and one that captions pictures writes about each.
        records: Saved records of attention weights (heatmap.npz, heatmap.json, or their folder), shown as they are. One
            may be of heads (heads.npz), which names roles, or an atlas, which the page shows beside the texts.
        choice: Which heads.
        tokens: How the page opens: with word pieces merged, with special tokens hidden.
        scale: What the darkest colour means as it opens: "fixed", "head" or "figure"; None = "fixed", of pictures
            "head".
        out: The file; `-` is stdout, and a pipe is written to; None = one under `attnscope-out/`, named after model,
            text and heads.
    """

    texts: tuple[str, ...] = ()
    several: TextsWanted = TextsWanted(split="file")
    reading: ReadingOptions = ReadingOptions()
    images: tuple[Path, ...] = ()
    records: tuple[Path, ...] = ()
    choice: Choice = Choice()
    tokens: Tokens = Tokens()
    scale: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        if not (self.texts or self.several.files or self.images or self.records):
            raise UsageError("there is nothing to show", "give TEXT, --file, --image, or --record")
        self.several.require_split()
        if self.scale is not None and self.scale not in SCALES:
            raise UsageError(f"there is no scale {self.scale!r}", f"choose one of {', '.join(SCALES)}")
        if self.out is not None and self.out.is_dir():
            raise UsageError(f"{self.out} is a folder", "--out names the page's file, such as page.html")
        if self.out is not None and not is_stream(self.out):
            require_replaceable(self.out, holds=PAGE_MARK)

    def prompts(self) -> Iterator[tuple[Given, float | None]]:
        """The texts and photos that the model reads, each with the share of files that is read by then."""
        photos = tuple(map(read_photo, self.images))
        if not (self.texts or self.several.files):
            yield from (
                (View((photo,), "", self.reading.generate) if self.reading.generate else photo, None)
                for photo in photos
            )
        for written in self.texts:
            yield self._prompt(read_text(written, may_be_blank=bool(photos)), photos), None
        if self.several.files:
            corpus = self.several.corpus()
            assert isinstance(corpus, Corpus)  # of files
            for text in corpus:
                if text.text is None:
                    raise AttnscopeError(
                        f"{text.source} holds token numbers, no text", "name the --field with the text"
                    )
                yield self._prompt(text.text, photos, text.pair), share_read(corpus)
            if corpus.problems:
                raise AttnscopeError(f"cannot read {corpus.problems[0]}")

    def start(self) -> Mapping[str, str]:
        """How the page opens, as its address says it."""
        opened = {"words": "1" if self.tokens.words else "", "hide": "1" if self.tokens.hide_special else ""}
        opened["scale"] = self.scale or ""
        picked = self.choice.pick or ()
        if len(picked) == 1:
            opened |= {"v": "matrix", "h": f"{picked[0][0]}.{picked[0][1]}"}
        return {name: value for name, value in opened.items() if value}

    def _prompt(self, text: str, photos: tuple[Photo, ...], pair: str | None = None) -> Given:
        if photos:
            return View(photos, text, self.reading.generate)
        prompt = self.reading.prompt(text)
        return prompt if pair is None else replace(prompt, pair=pair)


@dataclass(frozen=True, eq=False)
class WrittenPage:
    """A page that was written, and what is on it."""

    path: Path
    n_bytes: int
    records: tuple[Heatmap, ...]

    @property
    def is_stream(self) -> bool:
        """Whether it went to stdout or into a pipe: there is no file then."""
        return is_stream(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """What its reader must know, each sentence once."""
        return tuple(dict.fromkeys(note for record in self.records for note in record.run.get("notes", ())))

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "schema": PAGE_SCHEMA,
            "run": dict(self.records[0].run),
            "texts": [record.text for record in self.records],
            "files": [str(self.path)],
            "bytes": self.n_bytes,
        }


_FEW = 16
"""Texts up to which a page may do without torch; more are read one by one."""


def write_page(spec: str, order: PageOrder, loading: LoadOptions, report: Report | None = None) -> WrittenPage:
    """Loads the records and runs the model on the texts of a page, and writes it, whole or not at all.

    `report` is told how far it is after each text that the model has read.
    """
    if order.out is None or not is_stream(order.out):
        require_writable(HOME if order.out is None else order.out.parent)
    # What is at hand first: a record that cannot be read is said before a model runs.
    of_heads = [path for path in order.records if _is_of_heads(path)]
    if len(of_heads) > 1:
        raise UsageError("two records name the heads' roles", "give one heads.npz or atlas.npz")
    named = _load_heads(file_of(of_heads[0])) if of_heads else None
    maps = [path for path in order.records if path not in of_heads]
    if not (order.texts or order.several.files or order.images or maps):
        raise UsageError(
            "there is nothing to show beside heads",
            f"give TEXT, --file, --image, or a heatmap.npz; `attnscope show {of_heads[0]} -f html -o FOLDER` makes the "
            "page of the heads alone",
        )
    page_texts = [PageText(_choose_heads(_load_maps(path), order.choice)) for path in maps]
    if order.texts or order.several.files or order.images:
        prompts = order.prompts()
        first = [*islice(prompts, _FEW + 1)]
        texts = [prompt for prompt, _ in first if isinstance(prompt, Prompt)]
        few = len(texts) == len(first) <= _FEW
        model = loading.load_to_look(spec, texts) if few else loading.load(spec)
        n_tokens = 0
        for number, (prompt, share) in enumerate(chain(first, prompts), 1):
            page_texts.append(page_text(model, prompt, order.choice, page_texts))
            n_tokens += sum(len(attention.queries) for attention in page_texts[-1].record.maps)
            if report is not None:
                report(Progress(number, n_tokens, share))
    if named is not None:
        for shown in page_texts:
            _require_same_model(named, shown.record)
    if isinstance(named, Atlas):
        page = page_of(page_texts, start={"v": "grid", **order.start()}, heads=heads_of(named))
    else:
        page = page_of(page_texts, findings=named, start=order.start())
    path, content = order.out or _default_path(page_texts, order), page.html.encode()
    if is_stream(path):
        write_stream(path, content)
    else:
        write_whole(path, content)
    return WrittenPage(path, len(content), tuple(shown.record for shown in page_texts))


@with_plain_torch
def page(
    model: Model,
    texts: str | Sequence[str],
    *,
    findings: Heads | None = None,
    **prompt: Unpack[PromptOptions],
) -> Page:
    """Runs a model on texts and makes one page of them, with the full-width head of each layer to compare with.

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: One text or several.
        findings: What `attnscope.heads` found about the model's heads: names their roles.
        prompt: `pair`, `target`, `chat` and `generate`, as `attnscope.heatmap` takes them.

    Returns:
        The page: `save(path)` writes it, a notebook shows it.

    Raises:
        AttnscopeError: As `attnscope.heatmap`; or the weights are more than a browser would hold.
    """
    page_texts: list[PageText] = []
    for text in [texts] if isinstance(texts, str) else texts:
        page_texts.append(page_text(model, Prompt(text, **prompt), Choice(), page_texts))
        if findings is not None:
            _require_same_model(findings, page_texts[-1].record)
    return page_of(page_texts, findings=findings)


def page_text(model: Model, given: Given, choice: Choice, others: Sequence[PageText] = ()) -> PageText:
    """Run a model on a text and return what a page shows of it.

    Raises:
        AttnscopeError: With the other texts of the page, it would be too large for a browser. The model has not run.
    """
    model = reader_of(model, given)
    reading, chosen_heads = read(model, given), choice.within(model.info)
    record = outline(model.info, reading, chosen_heads)
    require_room([*(text.record for text in others), record])
    if model.look is not None:
        look = model.look(reading.tokens, chosen_heads.layers)
        record = fill_maps(record, look.weights, model.info)
        return PageText(record, {m.kind: _by_layer(m, look.full) for m in record.maps})
    from attnscope.core.attention.calls import WeightsBesideFullWidth

    probes: list[WeightsBesideFullWidth] = []

    def make_probe(**arguments: Any) -> WeightsBesideFullWidth:
        probes.append(WeightsBesideFullWidth(**arguments))
        return probes[-1]

    record = run_model(model, record, reading, make_probe)
    full: Mapping[Any, Mapping[int, Tensor]] = probes[0].full if probes else {}
    by_kind = {kind: {layer: tensor.numpy() for layer, tensor in by_layer.items()} for kind, by_layer in full.items()}
    return PageText(record, {m.kind: _by_layer(m, by_kind.get(m.kind, {})) for m in record.maps})


def _by_layer(attention: AttentionMap, full: Mapping[int, NDArray[np.float32]]) -> NDArray[np.float32]:
    """The full-width maps in the order of a map's layers; NaN where there is none."""
    whole = np.full((len(attention.layers), len(attention.queries), len(attention.keys)), np.nan, np.float32)
    for row, layer in enumerate(attention.layers):
        if layer in full:
            whole[row] = full[layer]
    return whole


def _load_maps(path: Path) -> Heatmap:
    """The record of a file or folder, also of bare arrays."""
    path = file_of(path)
    kind = KINDS.get(schema_of(path).partition("/")[0].removeprefix("attnscope."))
    if kind is not None and kind.page and not kind.query:
        raise AttnscopeError(
            f"{path} holds no attention on a text that a page could show: it is {kind.with_article}",
            f"`attnscope show {path} -f html -o FOLDER` makes the page of it",
        )
    return load_arrays(path) or Heatmap.load(path)


def _is_of_heads(path: Path) -> bool:
    """Return whether a saved record is of heads, or an atlas."""
    file = file_of(path)
    return file.is_file() and schema_of(file).startswith(("attnscope.heads/", "attnscope.atlas/"))


def _load_heads(path: Path) -> Heads | Atlas:
    """Return the record that names the roles; an atlas is also shown beside the texts."""
    return Atlas.load(path) if schema_of(path).startswith("attnscope.atlas/") else Heads.load(path)


def _choose_heads(record: Heatmap, choice: Choice) -> Heatmap:
    """A saved record with the chosen heads; an AttnscopeError if it does not hold them."""
    if choice.pick is not None:
        return record.only(choice.pick)
    if choice.layers is None and choice.heads is None:
        return record
    first = record.maps[0]
    return record.only(
        [(layer, head) for layer in choice.layers or first.layers for head in choice.heads or first.heads]
    )


def _require_same_model(findings: Heads | Atlas, record: Heatmap) -> None:
    of_heads, of_text = findings.run.get("sha256"), record.run.get("sha256")
    if of_heads and of_text and of_heads != of_text:
        raise AttnscopeError(
            f"the record of heads is of another model ({findings.run.get('model')}) than the attention "
            f"({record.run.get('model')}): their weights differ",
            "make one with `attnscope heads` on the same model",
        )


def _default_path(page_texts: Sequence[PageText], order: PageOrder) -> Path:
    """`<model>-<slug of the first text>-<8 hex of what is on the page>.html`."""
    first = page_texts[0].record
    marks = "".join(fingerprint(text.record) for text in page_texts)
    mark = fingerprint(first, page=marks, start=sorted(order.start().items()))
    return HOME / f"{slug(str(first.run.get('model', 'model')))}-{slug(first.text)}-{mark}.html"
