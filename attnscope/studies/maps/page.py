"""Collect texts and saved records for one page: run a model on each text, and keep what the page shows."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy as np

from attnscope.choice import Choice
from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus import Corpus
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model
from attnscope.output import DEFAULT_FOLDER
from attnscope.pages import PAGE_SCHEMA, Page, PageText, page_of, require_room
from attnscope.pages.heads import prepare_heads
from attnscope.questions.atlas import Atlas
from attnscope.questions.heads import Heads
from attnscope.questions.heatmap import Heatmap
from attnscope.questions.links import find_links
from attnscope.questions.maps import choose_heads
from attnscope.report.numbers import weight
from attnscope.results.kinds import KINDS, find_record
from attnscope.results.reading import schema_if_record
from attnscope.results.storage import is_stream, require_writable, write_stream, write_whole
from attnscope.senses.photos import read_photo
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import (
    PhotoPrompt,
    Prompt,
    PromptOptions,
    UserInput,
    choose_reader,
    read,
)
from attnscope.studies.inputs.texts import Progress, ReportProgress, share_read
from attnscope.studies.maps.options import PageOptions
from attnscope.studies.maps.running import outline, run_model
from attnscope.studies.maps.study import apply_changes, name_for
from attnscope.text import read_text

_MAX_WITHOUT_TORCH = 16
"""The most texts of a page on which NumPy may run the model; for more it pays to load torch."""

_FINDINGS: dict[str, type[Heads | Atlas]] = {"heads": Heads, "atlas": Atlas}
"""The kinds of records that name the roles of heads."""


class WrittenPage(NamedTuple):
    """Hold a written page and the records on it."""

    path: Path
    n_bytes: int
    records: tuple[Heatmap, ...]

    @property
    def is_stream(self) -> bool:
        """Return whether the page went to stdout or into a pipe, so that there is no file."""
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
        """Return a line for the terminal: the largest weight outside sinks on the first text; "" if there is none."""
        links = find_links(self.records[0], most=1)
        if not links:
            return ""
        link = links[0]
        # Labels are cut, so that the line has at most 80 characters.
        tokens = f"“{link.query[:16]}” → “{link.key[:16]}”"
        return f"a page of all maps; largest weight outside sinks: {link.head}  {tokens}  {weight(link.weight)}"

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
    spec: str, order: PageOptions, loading: LoadOptions, report: ReportProgress | None = None
) -> WrittenPage:
    """Load the records and run the model on the texts of a page, and write it, whole or not at all.

    Args:
        spec: The model.
        order: What is on the page, and the file to write.
        loading: How the model is loaded.
        report: Called after each text that the model has read.
    """
    # Check the folder before anything is computed.
    path = order.out
    if path is None:
        require_writable(DEFAULT_FOLDER)
    elif not is_stream(path):
        require_writable(path.parent)
    # Load the records first: one that cannot be read is refused before a model runs.
    findings, page_texts = _load_records(order)
    if order.needs_model:
        page_texts = _read_texts(spec, order, loading, page_texts, report)
    if findings is not None:
        for page_text in page_texts:
            _require_same_model(findings, page_text.record)
    # An atlas opens with the view "grid" of its heads.
    if isinstance(findings, Atlas):
        page = page_of(page_texts, start={"v": "grid", **order.start()}, heads=prepare_heads(findings))
    else:
        page = page_of(page_texts, findings=findings, start=order.start())
    # By default, the file is named by its first text and its content.
    content = page.html.encode()
    if path is None:
        path = DEFAULT_FOLDER / f"{name_for(page_texts[0].record, content)}.html"
    # A file appears whole or not at all; a pipe cannot be replaced.
    if is_stream(path):
        write_stream(path, content)
    else:
        write_whole(path, content)
    return WrittenPage(path, len(content), tuple(page_text.record for page_text in page_texts))


def _load_records(order: PageOptions) -> tuple[Heads | Atlas | None, list[PageText]]:
    """Return the saved record that names the roles of heads, if there is one, and the texts of the saved heatmaps."""
    findings: Heads | Atlas | None = None
    page_texts = []
    for name in order.record:
        path = find_record(name)
        # A schema is such as "attnscope.heads/2".
        kind_name = schema_if_record(path).partition("/")[0].removeprefix("attnscope.")
        if kind_name in _FINDINGS:
            if findings is not None:
                raise UsageError("two records name the heads' roles", "give one heads.npz or atlas.npz")
            findings = _FINDINGS[kind_name].load(path)
            continue
        # Records without queries hold no attention on a text: those that can be shown have pages of their own.
        kind = KINDS.get(kind_name)
        if kind is not None and kind.page and not kind.query:
            raise AttnscopeError(
                f"{path} holds no attention on a text that a page could show: it is {kind.with_article}",
                f"`attnscope show {path} -f html -o FOLDER` makes the page of it",
            )
        choice = order.choice
        record = choose_heads(Heatmap.load(path), choice.pick, choice.layers, choice.heads)
        page_texts.append(PageText(apply_changes(record, order.changes)))
    if not page_texts and not order.needs_model:
        raise UsageError(
            "there is nothing to show beside heads",
            f"give TEXT, --file, --image, or a heatmap.npz; `attnscope show {order.record[0]} -f html -o FOLDER` makes "
            "the page of the heads alone",
        )
    return findings, page_texts


def _read_texts(
    spec: str,
    order: PageOptions,
    loading: LoadOptions,
    saved: Sequence[PageText],
    report: ReportProgress | None,
) -> list[PageText]:
    """Run the model on each text of a page; return the saved texts, and after them those that the model has read."""
    # Take the first inputs out of the stream: if these are all, and all are texts, NumPy may run the model.
    inputs = _inputs(order)
    first = [*islice(inputs, _MAX_WITHOUT_TORCH + 1)]
    prompts = [given for given, _ in first if isinstance(given, Prompt)]
    are_few = len(prompts) == len(first) <= _MAX_WITHOUT_TORCH
    model = loading.load_for_maps(spec, prompts if are_few else None)
    # Run the model on these and on the rest of the stream, and change the maps as asked.
    page_texts = [*saved]
    n_tokens = 0
    for number, (given, share) in enumerate(chain(first, inputs), 1):
        page_text = read_page_text(model, given, order.choice, page_texts)
        record = apply_changes(page_text.record, order.changes)
        # A page compares maps with the full-width head of their layer; changed maps cannot be compared with it.
        if record is not page_text.record:
            page_text = PageText(record)
        page_texts.append(page_text)
        n_tokens += sum(len(attention.queries) for attention in record.maps)
        if report is not None:
            report(Progress(number, n_tokens, share))
    return page_texts


def _inputs(order: PageOptions) -> Iterator[tuple[UserInput, float | None]]:
    """Yield each input of the model, and the share of the files that has been read by then, 0 to 1; None = unknown."""
    photos = tuple(map(read_photo, order.image))
    n_generated = order.reading.generate

    def with_photos(text: str, pair: str | None = None) -> UserInput:
        if photos:
            return PhotoPrompt(photos, text, n_generated)
        return order.reading.prompt(text, pair)

    # Photos alone, each an input of its own; else texts, then files, all of them beside all photos.
    if not (order.texts or order.files):
        for photo in photos:
            given: UserInput = photo
            if n_generated:
                given = PhotoPrompt((photo,), "", n_generated)
            yield given, None
    for text in order.texts:
        yield with_photos(read_text(text, may_be_blank=bool(photos))), None
    if order.files:
        corpus = order.corpus()
        assert isinstance(corpus, Corpus)  # of files
        for item in corpus:
            yield with_photos(item.text or "", item.pair), share_read(corpus)
        if corpus.problems:
            raise AttnscopeError(f"cannot read {corpus.problems[0]}")


@with_default_torch
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
        page_texts.append(read_page_text(model, Prompt(text, **prompt), Choice(), page_texts))
        if findings is not None:
            _require_same_model(findings, page_texts[-1].record)
    return page_of(page_texts, findings=findings)


def read_page_text(
    model: Model, given: UserInput, choice: Choice, others: Sequence[PageText] = ()
) -> PageText:
    """Run a model on an input, and return its maps, and beside them the full-width head of each layer.

    Raises:
        AttnscopeError: With the other texts of the page, it would be too large for a browser. The model has not run.
    """
    # Refuse the page before the model runs, if it would be too large.
    model = choose_reader(model, given)
    reading = read(model, given)
    record = outline(model.info, reading, choice.within(model.info))
    require_room([*(text.record for text in others), record])
    # `run_model` fills in the full-width weights: kind → layer → (query, key).
    full_width: dict[str, Mapping[int, Any]] = {}
    record = run_model(model, record, reading, full_width)
    # For each kind, stack those of the map's layers, (layer, query, key); NaN where the model has none.
    stacked = {}
    for attention in record.maps:
        by_layer = full_width.get(attention.kind, {})
        unknown = np.full((len(attention.queries), len(attention.keys)), np.nan, np.float32)
        stacked[attention.kind] = np.stack([by_layer.get(layer, unknown) for layer in attention.layers])
    return PageText(record, stacked)


def _require_same_model(findings: Heads | Atlas, record: Heatmap) -> None:
    """Refuse roles of heads that were found in other weights than those that computed the attention."""
    findings_hash = findings.run.get("sha256")
    record_hash = record.run.get("sha256")
    if findings_hash and record_hash and findings_hash != record_hash:
        raise AttnscopeError(
            f"the record of heads is of another model ({findings.run.get('model')}) than the attention "
            f"({record.run.get('model')}): their weights differ",
            "make one with `attnscope heads` on the same model",
        )
