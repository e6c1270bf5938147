"""How a batch draws a text, in whichever worker gets it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attnscope import models
from attnscope.choice import Between, Choice, Chosen
from attnscope.corpus import tokens_of_ids
from attnscope.drawing.files import write_pages
from attnscope.drawing.style import Style
from attnscope.errors import AttnscopeError, is_out_of_memory
from attnscope.models.files import remember_hashes
from attnscope.models.model import Model
from attnscope.output import write
from attnscope.questions.batch import DrawnText
from attnscope.questions.heatmap_figures import pages
from attnscope.questions.shares import find_shares
from attnscope.results.file_sets import replace_together
from attnscope.results.kinds import FIGURE_FORMATS
from attnscope.results.storage import write_whole
from attnscope.studies.batch.folder import ENTRY, SHARES, own_files, require_own
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.reading import Prompt, Reading, read, truncate
from attnscope.studies.inputs.texts import special_ids
from attnscope.studies.maps.options import MapOptions
from attnscope.studies.maps.running import outline, run_model
from attnscope.studies.maps.study import apply_changes
from attnscope.studies.workers import Where, Workers


@dataclass(frozen=True)
class BatchOptions:
    """How texts are drawn.

    Attributes:
        layers: Numbers of layers; None = all.
        heads: Numbers of heads in those layers; None = all.
        pick: Single heads as (layer, head), instead of the other two.
        formats: Some of "png", "svg", "pdf", "npz", "json".
        style: How figures are drawn.
        query: A token whose attention is drawn as bars too, in the texts that have it.
        words: Whether word pieces are merged.
        hide_special: Whether special tokens are hidden.
        without_sinks: Whether sinks get nothing.
        mean: Over what heads are averaged: "heads", "layers" or "all"; None = they are not.
        between: From which part of each text to which other one attention is added up, in shares.csv; of texts that
            have both.
        chat: Whether each text is put into the model's chat template.
        generate: How many tokens a decoder writes after each text.
        workers: How many processes draw, each with a model of its own; None = one a core, as memory allows.
        threads: How many threads each of them computes with. By one thread results cannot depend on the workers.
        replace: Whether what is done already is drawn again, and figures of another model or other options, where
            they are in the folder, may be lost.
        loading: How the model is loaded.
        executor: "local": workers are processes of this machine; "ray": those of a Ray cluster, on whose machines the
            folder and the model must be the same.
        ray_address: Of the cluster; None = as Ray finds it, else one that is started on this machine.
    """

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    pick: tuple[tuple[int, int], ...] | None = None
    formats: tuple[str, ...] = ("png",)
    style: Style = Style()
    query: str | None = None
    words: bool = False
    hide_special: bool = False
    without_sinks: bool = False
    mean: str | None = None
    between: Between = Between()
    chat: bool = False
    generate: int = 0
    workers: int | None = None
    threads: int = 1
    loading: LoadOptions = LoadOptions()
    executor: Where = "local"
    ray_address: str | None = None
    replace: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        # What makes no sense is refused at once.
        Workers("", 1 if self.workers is None else self.workers, self.threads, self.executor, self.ray_address)

    def map_options(self) -> MapOptions:
        """What is asked of the maps of each text."""
        choice = Choice(self.layers, self.heads, self.pick)
        tokens = {name: getattr(self, name) for name in ("query", "words", "hide_special", "without_sinks", "mean")}
        return MapOptions(choice=choice, between=self.between, **tokens)


@dataclass(frozen=True)
class Task:
    """One text to draw; see `CorpusText` and `DrawnText`."""

    index: int
    source: str
    line: int
    text: str | None
    ids: tuple[int, ...] | None
    folder: Path
    fingerprint: str
    pair: str | None = None


@dataclass(frozen=True)
class Done:
    """What became of a task.

    Attributes:
        n_tokens: How many tokens the text has; 0 if it failed.
        reason: Why it failed; empty if it did not.
    """

    n_tokens: int = 0
    reason: str = ""


@dataclass
class Drawer:
    """Draws one text after the other in a worker, which gets a pickled copy and loads the model once.

    Attributes:
        source: The model.
        options: How texts are drawn.
        hashes: Of the model's files; see `models.files.hashes`.
        asked: See `DrawnText`.
    """

    source: models.Source
    options: BatchOptions
    hashes: dict[tuple[Path, int, int], str]
    asked: Mapping[str, str]
    _loaded: _Loaded | None = None

    def load(self) -> None:
        """Load the model, unless that is done."""
        if self._loaded is not None:
            return
        import torch

        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # else it tells of fonts, once a text
        torch.set_num_threads(self.options.threads)
        remember_hashes(self.hashes)
        model = self.options.loading.load(self.source)
        heads = self.options.map_options().choice.within(model.info)
        self._loaded = _Loaded(model, heads, special_ids(model))

    def __call__(self, task: Task) -> Done:
        """Draw a text; an error is reported, and leaves the files that were there."""
        try:
            require_own(task.folder)
            with replace_together(task.folder, own_files()) as staged:
                n_tokens = self._draw(task, staged)
        except Exception as error:
            return Done(reason=_reason(error))
        return Done(n_tokens)

    def _draw(self, task: Task, folder: Path) -> int:
        assert self._loaded is not None
        model, heads = self._loaded.model, self._loaded.heads
        options, formats = self.options.map_options(), self.options.formats
        reading = self._read(task)
        record = run_model(model, outline(model.info, reading, heads), reading)
        record = apply_changes(record, options)
        record = record.average(options.mean) if options.mean else record
        notes = list(record.run["notes"])
        shares = []
        if self.options.between:
            try:
                shares = [find_shares(record, *options.between.parts).save(folder / SHARES)]
            except AttnscopeError as error:
                notes.append(f"{error} here")
        query = options.query
        if query is not None and not any(m.queries.find(query) for m in record.maps):
            notes.append(f"no token is {query!r} here")  # of many texts, some lack it
            query = None
        figures = [name for name in formats if name in FIGURE_FORMATS]
        # Compressing beside drawing would take the cores of other workers.
        paths = write_pages(pages(record, self.options.style, query), folder, figures, threads=0)
        paths += write(record, folder, [name for name in formats if name not in figures])
        paths += shares
        entry = DrawnText(
            index=task.index,
            source=task.source,
            line=task.line,
            folder=task.folder.name,
            text=task.text or "",
            tokens=reading.tokens.labels,
            files={path.name: path.stat().st_size for path in paths},
            model=model.info.name,
            run={name: record.run[name] for name in ("sha256", "engine", "dtype", "device", "versions")},
            notes=tuple(notes),
            fingerprint=task.fingerprint,
            asked=self.asked,
        )
        write_whole(folder / ENTRY, entry.entry().encode("utf-8", "backslashreplace"))
        return len(entry.tokens)

    def _read(self, task: Task) -> Reading:
        assert self._loaded is not None
        model, options = self._loaded.model, self.options
        if task.ids is None:
            return read(model, Prompt(task.text or "", task.pair, chat=options.chat, generate=options.generate))
        if len(model.info.kinds) > 1 or options.chat or options.generate:
            raise AttnscopeError(
                "token numbers are shown as they are, by models of one kind of attention", "give texts"
            )
        tokens, cut = truncate(tokens_of_ids(task.ids, self._loaded.special_ids), model.info.max_tokens)
        return Reading("", tokens, None, (cut,) if cut else ())


@dataclass(frozen=True)
class _Loaded:
    """What all texts need: the model, and the heads that are shown."""

    model: Model
    heads: Chosen
    special_ids: frozenset[int]


def _reason(error: Exception) -> str:
    if isinstance(error, AttnscopeError):
        return str(error)
    if is_out_of_memory(error):
        return "not enough memory"
    return f"internal error: {type(error).__name__}: {error}"
