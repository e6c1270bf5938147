"""Collect texts and saved records for one page: run a model on each text, and keep what the page shows."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from attnscope.choice import Choice
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.output import HOME
from attnscope.pages import PAGE_SCHEMA, Page, PageText, page_of, require_room
from attnscope.pages.heads import heads_of
from attnscope.questions.atlas import Atlas
from attnscope.questions.heads import Heads
from attnscope.questions.heatmap import AttentionMap, Heatmap
from attnscope.questions.links import find_links
from attnscope.questions.maps import choose_heads
from attnscope.report.numbers import weight
from attnscope.results.kinds import KINDS, file_of
from attnscope.results.reading import schema_of
from attnscope.results.storage import is_stream, require_writable, write_stream, write_whole
from attnscope.senses.photos import read_photo
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import Given, Prompt, PromptOptions, View, read, reader_of
from attnscope.studies.inputs.texts import Progress, Report, share_read
from attnscope.studies.maps.options import PageOrder
from attnscope.studies.maps.running import outline, run_model
from attnscope.studies.maps.study import apply_changes
from attnscope.text import read_text, slug

_FEW = 16
"""The most texts of a page that may be run without torch."""

_WITH_ROLES: dict[str, type[Heads | Atlas]] = {"heads": Heads, "atlas": Atlas}
"""Records that name the roles of heads."""


@dataclass(frozen=True, eq=False)
class WrittenPage:
    """Hold a written page and the records on it."""

    path: Path
    n_bytes: int
    records: tuple[Heatmap, ...]

    @property
    def is_stream(self) -> bool:
        """Return whether it went to stdout or into a pipe: there is no file then."""
        return is_stream(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes of its records, each sentence once."""
        notes: dict[str, None] = {}
        for record in self.records:
            notes |= dict.fromkeys(record.run.get("notes", ()))
        return tuple(notes)

    @property
    def answer(self) -> str:
        """Return the strongest link of the first text, in a line of at most 80 characters; empty if it has none."""
        for link in find_links(self.records[0], most=1):
            tokens = f"“{link.query[:16]}” → “{link.key[:16]}”"
            return f"a page of all maps; largest weight outside sinks: {link.head}  {tokens}  {weight(link.weight)}"
        return ""

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints, as plain JSON values."""
        return {
            "schema": PAGE_SCHEMA,
            "run": dict(self.records[0].run),
            "texts": [record.text for record in self.records],
            "files": [str(self.path)],
            "bytes": self.n_bytes,
        }


def write_page(
    spec: str, order: PageOrder, loading: LoadOptions, report: Report | None = None
) -> WrittenPage:
    """Load the records and run the model on the texts of a page, and write it, whole or not at all.

    Args:
        spec: The model.
        order: The contents of the page, and its file.
        loading: How the model is loaded.
        report: Called after each text that the model has read.
    """
    # Check the folder before anything is computed.
    path = order.out
    if path is None:
        require_writable(HOME)
    elif not is_stream(path):
        require_writable(path.parent)
    # Load the records first: one that cannot be read is refused before a model runs.
    named, page_texts = _load_records(order)
    if order.is_read:
        _read_texts(spec, order, loading, page_texts, report)
    if named is not None:
        for shown in page_texts:
            _require_same_model(named, shown.record)
    # An atlas opens with the grid of its heads.
    if isinstance(named, Atlas):
        page = page_of(page_texts, start={"v": "grid", **order.start()}, heads=heads_of(named))
    else:
        page = page_of(page_texts, findings=named, start=order.start())
    # By default the file is named by the model, the first text, and a hash of the page.
    content = page.html.encode()
    if path is None:
        first = page_texts[0].record
        mark = hashlib.sha256(content).hexdigest()[:8]
        path = HOME / f"{slug(str(first.run.get('model', 'model')))}-{slug(first.text)}-{mark}.html"
    # A file appears whole or not at all; a pipe cannot be replaced.
    if is_stream(path):
        write_stream(path, content)
    else:
        write_whole(path, content)
    return WrittenPage(path, len(content), tuple(shown.record for shown in page_texts))


def _load_records(order: PageOrder) -> tuple[Heads | Atlas | None, list[PageText]]:
    """Return the record that names the roles of heads, if there is one, and the texts of the records with maps."""
    named: list[Heads | Atlas] = []
    shown = []
    for given in order.record:
        path = file_of(given)
        schema = ""
        if path.is_file():
            schema = schema_of(path).partition("/")[0].removeprefix("attnscope.")
        if schema in _WITH_ROLES:
            named.append(_WITH_ROLES[schema].load(path))
            continue
        # Records of other questions have pages of their own, if any.
        kind = KINDS.get(schema)
        if kind is not None and kind.page and not kind.query:
            raise AttnscopeError(
                f"{path} holds no attention on a text that a page could show: it is {kind.with_article}",
                f"`attnscope show {path} -f html -o FOLDER` makes the page of it",
            )
        choice = order.choice
        record = choose_heads(Heatmap.load(path), choice.pick, choice.layers, choice.heads)
        shown.append(PageText(apply_changes(record, order.changes)))
    # Refuse what cannot be one page.
    if len(named) > 1:
        raise UsageError("two records name the heads' roles", "give one heads.npz or atlas.npz")
    if not shown and not order.is_read:
        raise UsageError(
            "there is nothing to show beside heads",
            f"give TEXT, --file, --image, or a heatmap.npz; `attnscope show {order.record[0]} -f html -o FOLDER` makes "
            "the page of the heads alone",
        )
    return named[0] if named else None, shown


def _read_texts(
    spec: str, order: PageOrder, loading: LoadOptions, page_texts: list[PageText], report: Report | None
) -> None:
    """Run the model on each text of a page, and append the texts with their maps to `page_texts`."""
    # Read the first inputs: if there are few, and all are texts, the model may be run without torch.
    inputs = _inputs(order)
    first = [*islice(inputs, _FEW + 1)]
    prompts = [given for given, _ in first if isinstance(given, Prompt)]
    are_few = len(prompts) == len(first) <= _FEW
    model = loading.load_for_maps(spec, prompts if are_few else None)
    # Run the model on one after the other, and change its maps as asked.
    n_tokens = 0
    for number, (given, share) in enumerate(chain(first, inputs), 1):
        shown = page_text(model, given, order.choice, page_texts)
        # Changed maps lose the full-width ones, which are of the model's own weights.
        changed = apply_changes(shown.record, order.changes)
        if changed is not shown.record:
            shown = PageText(changed)
        page_texts.append(shown)
        n_tokens += sum(len(attention.queries) for attention in changed.maps)
        if report is not None:
            report(Progress(number, n_tokens, share))


def _inputs(order: PageOrder) -> Iterator[tuple[Given, float | None]]:
    """Yield what the model reads, each with the share of the files that has been read by then; None = unknown."""
    photos = tuple(map(read_photo, order.image))
    n_generated = order.reading.generate

    def with_photos(text: str, pair: str | None = None) -> Given:
        if photos:
            return View(photos, text, n_generated)
        return order.reading.prompt(text, pair)

    # Photos alone; else texts, then files.
    if not (order.texts or order.files):
        for photo in photos:
            yield View((photo,), "", n_generated) if n_generated else photo, None
    for text in order.texts:
        yield with_photos(read_text(text, may_be_blank=bool(photos))), None
    if order.files:
        corpus = order.corpus()
        assert isinstance(corpus, Corpus)  # of files
        for item in corpus:
            yield with_photos(item.text or "", item.pair), share_read(corpus)
        if corpus.problems:
            raise AttnscopeError(f"cannot read {corpus.problems[0]}")


@with_plain_torch
def page(
    model: Model,
    texts: str | Sequence[str],
    *,
    findings: Heads | None = None,
    **prompt: Unpack[PromptOptions],
) -> Page:
    """Run a model on texts and make one page of them, with the full-width head of each layer to compare with.

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: One text or several.
        findings: The result of `attnscope.heads` for the model, which names the roles of its heads.
        prompt: `pair`, `target`, `chat` and `generate`, as `attnscope.heatmap` takes them.

    Returns:
        The page: `save(path)` writes it, a notebook shows it.

    Raises:
        AttnscopeError: As `attnscope.heatmap`; or the weights are more than a browser would hold.
    """
    page_texts: list[PageText] = []
    if isinstance(texts, str):
        texts = [texts]
    for text in texts:
        page_texts.append(page_text(model, Prompt(text, **prompt), Choice(), page_texts))
        if findings is not None:
            _require_same_model(findings, page_texts[-1].record)
    return page_of(page_texts, findings=findings)


def page_text(model: Model, given: Given, choice: Choice, others: Sequence[PageText] = ()) -> PageText:
    """Run a model on a text and return what a page shows of it.

    Raises:
        AttnscopeError: With the other texts of the page, it would be too large for a browser. The model has not run.
    """
    # Refuse the page before the model runs, if it would be too large.
    model = reader_of(model, given)
    reading = read(model, given)
    record = outline(model.info, reading, choice.within(model.info))
    require_room([*(text.record for text in others), record])
    # By kind and layer, (query, key).
    full_width: dict[str, Mapping[int, Any]] = {}
    record = run_model(model, record, reading, full_width)
    return PageText(record, {m.kind: _stack_layers(m, full_width.get(m.kind, {})) for m in record.maps})


def _stack_layers(attention: AttentionMap, by_layer: Mapping[int, Any]) -> NDArray[np.float32]:
    """Return the full-width maps in the order of a map's layers, (layer, query, key); NaN where there is none."""
    unknown = np.full((len(attention.queries), len(attention.keys)), np.nan, np.float32)
    return np.stack([by_layer.get(layer, unknown) for layer in attention.layers])


def _require_same_model(findings: Heads | Atlas, record: Heatmap) -> None:
    """Refuse a record of heads that is of other weights than the attention."""
    of_heads, of_text = findings.run.get("sha256"), record.run.get("sha256")
    if of_heads and of_text and of_heads != of_text:
        raise AttnscopeError(
            f"the record of heads is of another model ({findings.run.get('model')}) than the attention "
            f"({record.run.get('model')}): their weights differ",
            "make one with `attnscope heads` on the same model",
        )
