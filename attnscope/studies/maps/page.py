"""Collect texts and saved records for one page: run a model on each text, and write the page.

A record is the saved result of a study. Here it is mostly a `Heatmap`, the attention maps of one text. The package
`pages` makes the HTML.
"""

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
from attnscope.studies.maps.running import make_empty_record, run_model
from attnscope.studies.maps.study import apply_changes, make_file_name
from attnscope.text import read_text

_MAX_WITHOUT_TORCH = 16
"""The most texts of a page on which NumPy may run the model; for more texts, loading torch takes less time in all."""

_FINDINGS: dict[str, type[Heads | Atlas]] = {"heads": Heads, "atlas": Atlas}
"""The kinds of records that name the roles of heads, by the name in their schema."""


class WrittenPage(NamedTuple):
    """Hold a written page and the records on it."""

    path: Path
    n_bytes: int
    records: tuple[Heatmap, ...]

    @property
    def is_stream(self) -> bool:
        """Return whether the page was written to stdout or a pipe, so that there is no file."""
        return is_stream(self.path)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the notes of the records, such as that a text was cut; each note once, in the order of the records."""
        # A dict keeps the order, where a set would not.
        notes: dict[str, None] = {}
        for record in self.records:
            notes |= dict.fromkeys(record.run.get("notes", ()))
        return tuple(notes)

    @property
    def answer(self) -> str:
        """Return a line for the terminal: the largest weight outside sinks on the first text; "" = all are on sinks."""
        top_links = find_links(self.records[0], max_links=1)
        if not top_links:
            return ""
        link = top_links[0]
        # Token labels are truncated, so that the line has at most 80 characters.
        tokens = f"“{link.query[:16]}” → “{link.key[:16]}”"
        return f"a page of all maps; largest weight outside sinks: {link.head}  {tokens}  {weight(link.weight)}"

    def as_json(self) -> dict[str, Any]:
        """Return the JSON values that `--json` prints."""
        return {
            "schema": PAGE_SCHEMA,
            "run": dict(self.records[0].run),
            "texts": [record.text for record in self.records],
            "files": [str(self.path)],
            "bytes": self.n_bytes,
        }


def write_page(
    spec: str, options: PageOptions, load_options: LoadOptions, report: ReportProgress | None = None
) -> WrittenPage:
    """Load the records, run the model on the texts of a page, and write the page.

    Args:
        spec: The name or folder of the model.
        options: What is on the page, and the file to write.
        load_options: How the model is loaded.
        report: Called after each text that the model has read.
    """
    # Check the output folder before anything is computed. None = the default folder.
    path = options.out
    if path is None:
        require_writable(DEFAULT_FOLDER)
    elif not is_stream(path):
        require_writable(path.parent)
    # Load the records first: one that cannot be read is refused before a model runs.
    findings, page_texts = _load_records(options)
    if options.needs_model:
        page_texts = _run_texts(spec, options, load_options, page_texts, report)
    if findings is not None:
        for page_text in page_texts:
            _require_same_model(findings, page_text.record)
    # An atlas opens with the view "grid" of its heads.
    if isinstance(findings, Atlas):
        page = page_of(page_texts, start={"v": "grid", **options.start()}, heads=prepare_heads(findings))
    else:
        page = page_of(page_texts, findings=findings, start=options.start())
    # The default file name comes from the first text and a hash of the content.
    content = page.html.encode()
    if path is None:
        path = DEFAULT_FOLDER / f"{make_file_name(page_texts[0].record, content)}.html"
    # `write_whole` replaces the file in one step, so that it is never half written. A pipe cannot be replaced.
    if is_stream(path):
        write_stream(path, content)
    else:
        write_whole(path, content)
    return WrittenPage(path, len(content), tuple(page_text.record for page_text in page_texts))


def _load_records(options: PageOptions) -> tuple[Heads | Atlas | None, list[PageText]]:
    """Load the saved records of a page.

    Returns:
        The record that names the roles of heads, None if no such record is given; and the saved heatmaps.
    """
    findings: Heads | Atlas | None = None
    page_texts = []
    for name in options.record:
        path = find_record(name)
        # A schema looks like "attnscope.heads/2".
        kind_name = schema_if_record(path).partition("/")[0].removeprefix("attnscope.")
        if kind_name in _FINDINGS:
            if findings is not None:
                raise UsageError("two records name the heads' roles", "give one heads.npz or atlas.npz")
            findings = _FINDINGS[kind_name].load(path)
            continue
        # A kind of record without queries holds no attention on a text, but it may have a page of another form.
        kind = KINDS.get(kind_name)
        if kind is not None and kind.page and not kind.query:
            raise AttnscopeError(
                f"{path} holds no attention on a text that a page could show: it is {kind.with_article}",
                f"`attnscope show {path} -f html -o FOLDER` makes the page of it",
            )
        choice = options.choice
        record = choose_heads(Heatmap.load(path), choice.pick, choice.layers, choice.heads)
        page_texts.append(PageText(apply_changes(record, options.changes)))
    if not page_texts and not options.needs_model:
        raise UsageError(
            "there is nothing to show beside heads",
            f"give TEXT, --file, --image, or a heatmap.npz; `attnscope show {options.record[0]} -f html -o FOLDER` "
            "makes the page of the heads alone",
        )
    return findings, page_texts


def _run_texts(
    spec: str,
    options: PageOptions,
    load_options: LoadOptions,
    saved_texts: Sequence[PageText],
    report: ReportProgress | None,
) -> list[PageText]:
    """Run the model on each input of a page; return the saved texts, then those of the inputs."""
    # Read ahead: if the inputs end here, and all are texts, NumPy may run the model.
    inputs = _iterate_inputs(options)
    first_inputs = [*islice(inputs, _MAX_WITHOUT_TORCH + 1)]
    prompts = [model_input for model_input, _ in first_inputs if isinstance(model_input, Prompt)]
    can_run_numpy = len(prompts) == len(first_inputs) <= _MAX_WITHOUT_TORCH
    model = load_options.load_for_maps(spec, prompts if can_run_numpy else None)
    # Run the model on these inputs and on the rest. Change the maps as the options say.
    page_texts = [*saved_texts]
    n_tokens = 0
    for n_read, (model_input, share_of_files) in enumerate(chain(first_inputs, inputs), 1):
        page_text = read_page_text(model, model_input, options.choice, page_texts)
        record = apply_changes(page_text.record, options.changes)
        # A page compares maps with the full-width head of their layer, one head as wide as d_model. Changed maps, such
        # as averages, cannot be compared with it, so leave it out.
        if record is not page_text.record:
            page_text = PageText(record)
        page_texts.append(page_text)
        n_tokens += sum(len(attention_map.queries) for attention_map in record.maps)
        if report is not None:
            report(Progress(n_read, n_tokens, share_of_files))
    return page_texts


def _iterate_inputs(options: PageOptions) -> Iterator[tuple[UserInput, float | None]]:
    """Yield each input of the model, and the share of the files that is read so far, 0 to 1; None = unknown."""
    photos = tuple(map(read_photo, options.image))
    n_generated = options.reading.generate

    def prompt_beside_photos(text: str, pair: str | None = None) -> UserInput:
        if photos:
            return PhotoPrompt(photos, text, n_generated)
        return options.reading.prompt(text, pair)

    # Photos without a text are an input each. Otherwise each text is an input, together with all photos.
    if not (options.texts or options.files):
        for photo in photos:
            model_input: UserInput = photo
            if n_generated:
                model_input = PhotoPrompt((photo,), "", n_generated)
            yield model_input, None
    for text in options.texts:
        yield prompt_beside_photos(read_text(text, may_be_blank=bool(photos))), None
    if options.files:
        corpus = options.corpus()
        assert isinstance(corpus, Corpus)  # a list comes only from a text on the command line
        for item in corpus:
            yield prompt_beside_photos(item.text or "", item.pair), share_read(corpus)
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
    """Run a model on texts, and make one page of their attention maps.

    For comparison, the page also shows the full-width head of each layer: its attention if it had one head as wide as
    d_model.

    Args:
        model: A loaded model, see `attnscope.load`.
        texts: One text or several.
        findings: The result of `attnscope.heads` for the model, which names the roles of its heads.
        prompt: `pair`, `target`, `chat` and `generate`, as `attnscope.heatmap` takes them.

    Returns:
        The page: `save(path)` writes it, and a notebook shows it.

    Raises:
        AttnscopeError: As `attnscope.heatmap`; or there are more weights than a browser can hold.
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
    model: Model, model_input: UserInput, choice: Choice, other_texts: Sequence[PageText] = ()
) -> PageText:
    """Run a model on an input, and return its maps and the full-width head of each layer.

    Raises:
        AttnscopeError: With the other texts, the page would be too large for a browser. The model has not run.
    """
    # Refuse a page that would be too large before the model runs.
    model = choose_reader(model, model_input)
    reading = read(model, model_input)
    record = make_empty_record(model.info, reading, choice.within(model.info))
    require_room([*(text.record for text in other_texts), record])
    # `run_model` fills in the full-width weights: kind of attention → layer → (query, key).
    full_width: dict[str, Mapping[int, Any]] = {}
    record = run_model(model, record, reading, full_width)
    # For each kind, stack the layers of the map: (layer, query, key). Layers without a full-width head are NaN.
    full_width_maps = {}
    for attention_map in record.maps:
        by_layer = full_width.get(attention_map.kind, {})
        no_weights = np.full((len(attention_map.queries), len(attention_map.keys)), np.nan, np.float32)
        full_width_maps[attention_map.kind] = np.stack(
            [by_layer.get(layer, no_weights) for layer in attention_map.layers]
        )
    return PageText(record, full_width_maps)


def _require_same_model(findings: Heads | Atlas, record: Heatmap) -> None:
    """Refuse roles of heads from another model than the model that computed the attention, by their weights' hashes."""
    findings_hash = findings.run.get("sha256")
    record_hash = record.run.get("sha256")
    if findings_hash and record_hash and findings_hash != record_hash:
        raise AttnscopeError(
            f"the record of heads is of another model ({findings.run.get('model')}) than the attention "
            f"({record.run.get('model')}): their weights differ",
            "make one with `attnscope heads` on the same model",
        )
