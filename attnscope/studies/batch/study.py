"""Draw many texts into one folder as `heatmap` draws each, by several processes, and nothing twice.

Each text has a folder of its own, whose files appear together. One of them, `entry.json`, lists the others with a
fingerprint of all that they depend on. So a run can be killed at any moment, and the next run draws what is missing.
"""

import contextlib
import csv
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from attnscope import models
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.drawing.files import write_pages
from attnscope.errors import AttnscopeError, parse_json
from attnscope.host import physical_bytes
from attnscope.models.catalog import verify
from attnscope.models.files import HASHES, file_sha256
from attnscope.models.model import Model
from attnscope.output import write
from attnscope.pages.gallery import page
from attnscope.questions.batch import Batch, DrawnText, FailedText
from attnscope.questions.heatmap_figures import pages
from attnscope.questions.shares import find_shares
from attnscope.results.kinds import FIGURE_FORMATS
from attnscope.results.storage import (
    csv_text,
    remove_unfinished,
    replace_together,
    require_replaceable,
    require_writable,
    write_whole,
)
from attnscope.studies.batch.options import BatchOptions
from attnscope.studies.failures import failure
from attnscope.studies.inputs.options import SharedWork
from attnscope.studies.inputs.provenance import versions
from attnscope.studies.inputs.reading import Prompt, read
from attnscope.studies.inputs.texts import Progress, Report, share_read, texts_of
from attnscope.studies.maps.running import outline, run_model
from attnscope.studies.maps.study import apply_changes
from attnscope.studies.workers import Workers
from attnscope.text import slug

MANIFEST = "manifest.jsonl"
INDEX = "index.html"
ENTRY = "entry.json"

SHARES = "shares.csv"
"""What heads give from one part of a text to another: a file in the folder of each text, and one of all texts."""

_BEGINNINGS = {
    MANIFEST: b'"index": ',
    INDEX: b": what each head attends to</title>",
    SHARES: b"index,source,line",
}
"""The files that list all texts, and bytes near the beginning of each: a file without them is not ours to replace."""

_PROCESS_BYTES = 700e6
_TIMES_WEIGHTS = 2
"""The memory of a process besides its model, and that of the model as a multiple of its files."""


@with_plain_torch
def batch(
    spec: str,
    texts: Corpus | Sequence[str],
    out: str | Path,
    options: BatchOptions | None = None,
    report: Report | None = None,
) -> Batch:
    """Draw every text into a folder of its own, with a manifest and an index.html of all.

    A second call skips texts that are drawn already with the same model, options and versions. So it completes a run
    that was interrupted or killed. The same texts give the same files, byte for byte, whatever the number of workers.

    Args:
        spec: The model by its name, as `attnscope.load` takes it: each worker loads it.
        texts: The texts; those of stdin are drawn as they come.
        out: The folder. No other run may write into it at the same time.
        options: How they are drawn; None = the defaults.
        report: Called after each text that was drawn.

    Returns:
        The texts that are drawn, and those that failed: these do not end the run. After Ctrl-C `complete` is False.

    Raises:
        AttnscopeError: Nothing can be drawn: no such model, layer or head, no text, a folder that cannot be written.
    """
    if not isinstance(spec, str):
        raise AttnscopeError("a batch takes a model by its name", "each of its processes loads it")
    options = options or BatchOptions()
    out = Path(out)
    # Check the folder, and remove half-written files before anything is drawn.
    listed_texts = texts_of(texts)
    require_writable(out)
    for name, beginning in _BEGINNINGS.items():
        require_replaceable(out / name, mark=beginning)
    _sweep(out)
    source = options.loading.resolve(spec)
    executor = _workers(options.running, source, options).executor_on(options.loading.device)
    if source.folder is not None:
        source = replace(source, folder=source.folder.absolute())  # Ray's workers stand elsewhere
    common = _hash_all_but_the_text(source, options)

    # Read texts as workers need them, and pass over those that are done. By index; None = not drawn yet.
    results: dict[int, DrawnText | FailedText | None] = {}

    def tasks() -> Iterator[_Task]:
        for text in listed_texts:
            folder = out.absolute() / folder_name(text.index, text.written)
            task = _Task(text, folder, hashlib.sha256(common + text.digested()).hexdigest())
            results[text.index] = task.find_done()
            if results[text.index] is None:
                yield task

    # Draw the others.
    n_new = n_tokens = 0
    complete = True
    error: Exception | None = None
    drawer = _Drawer(source, options, dict(HASHES))
    try:
        with contextlib.closing(executor.map_blocks(drawer, tasks())) as outcomes:
            for number, outcome in enumerate(outcomes, 1):
                text = outcome.block.text
                result = outcome.result or _fail(text, outcome.lost)
                results[text.index] = result
                if isinstance(result, DrawnText):
                    n_new += 1
                    n_tokens += len(result.tokens)
                if report is not None:
                    report(Progress(number, n_tokens, share_read(listed_texts, text.index)))
    except KeyboardInterrupt:
        complete = False
    except Exception as raised:  # it is raised when the texts that are drawn have their index
        error = raised
        complete = False

    # Remove the half text of a worker that was stopped, and list all others.
    _sweep(out)
    drawn = [result for result in results.values() if isinstance(result, DrawnText)]
    failed = [result for result in results.values() if isinstance(result, FailedText)]
    if isinstance(texts, Corpus):
        failed += [
            FailedText(problem.source, problem.line, problem.reason) for problem in texts.problems
        ]
    finished = Batch(source.name, len(results), drawn, failed, n_new, complete)
    _write_lists(out, finished)
    if error is not None:
        raise error
    return finished


def folder_name(index: int, text: str) -> str:
    """Return the name of a text's folder, such as `00007-the-first-words`: letters, digits and hyphens alone."""
    return f"{index:05d}-{slug(text)}"


def _write_lists(out: Path, finished: Batch) -> None:
    """Write the files that list all texts. If nothing was drawn before Ctrl-C, those of an earlier run stay."""
    if finished.drawn or finished.complete:
        with replace_together(out) as staged:
            write_whole(staged / INDEX, _encode(page(finished)))
            write_whole(staged / MANIFEST, _encode(finished.manifest()))
            _write_shares(out, finished.drawn, staged / SHARES)


def _write_shares(out: Path, drawn: Sequence[DrawnText], path: Path) -> None:
    """Write the shares of all texts into one file, if any text has shares."""
    rows: list[tuple[str, ...]] = []
    for text in drawn:
        if SHARES in text.files:
            with (out / text.folder / SHARES).open(encoding="utf-8", newline="") as file:
                header, *shares = csv.reader(file)
            # All files have the same header: it is written once.
            rows = rows or [("index", "source", "line", *header)]
            rows += [(str(text.index), text.source, str(text.line), *share) for share in shares]
    if rows:
        write_whole(path, _encode(csv_text(rows)))


def _encode(content: str) -> bytes:
    """Return a text in UTF-8. Lone surrogates, from file names that are no UTF-8, are escaped as in JSON."""
    return content.encode("utf-8", "backslashreplace")


def _fail(text: CorpusText, reason: str) -> FailedText:
    return FailedText(text.source, text.line, reason, text.index, text.text or "")


def _workers(running: SharedWork, source: models.Source, options: BatchOptions) -> Workers:
    """Return the workers; by default one per core of this machine, as far as memory holds a model for each."""
    if running.workers is None and running.executor == "local":
        n_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        # Bytes of the model's files; a built-in model is small.
        weights = sum(path.stat().st_size for path in source.folder.glob("*.*")) if source.folder else 0
        memory = physical_bytes() or float("inf")
        n_fitting = memory / (_PROCESS_BYTES + _TIMES_WEIGHTS * weights)
        running = replace(running, workers=max(1, int(min(n_cores, n_fitting))))
    workers = running.share(source.spec, options.loading)
    assert workers is not None  # there is a number of workers, or they are Ray's
    return workers


def _hash_all_but_the_text(source: models.Source, options: BatchOptions) -> bytes:
    """Hash all that files depend on besides the text: the model's files, the options and the versions."""
    # A built-in model has no files: it depends on our version alone.
    digests = {}
    if source.folder is not None:
        digests["weights"] = verify(source)
        small = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
        beside = [path for path in sorted(source.folder.iterdir()) if path.suffix in small]
        if source.adapter is not None:
            beside += sorted(source.adapter.iterdir())
        digests |= {str(path): file_sha256(path) for path in beside if path.is_file()}
    # Figures do not depend on the number and place of workers.
    how = asdict(replace(options, running=SharedWork()))
    libraries = versions() | {name: version(name) for name in ("matplotlib", "pillow")}
    parts = json.dumps([source.name, digests, how, libraries], default=str)
    return hashlib.sha256(_encode(parts)).digest()


# The folder


def _sweep(out: Path) -> None:
    """Remove the half-written files that killed runs have left."""
    remove_unfinished(out)
    for folder in out.glob("[0-9]*-*"):
        if not folder.is_symlink():
            remove_unfinished(folder)


def _list_files(folder: Path) -> list[str]:
    """Return the names of the files of a text, from the entry in its folder; empty without an entry."""
    files = _read_entry(folder).get("files")
    return [*map(str, files), ENTRY] if isinstance(files, dict) else []


def _read_entry(folder: Path) -> dict[str, Any]:
    """Return what the entry in a text's folder holds; empty without an entry, or if it is damaged."""
    if folder.is_symlink():
        return {}
    try:
        entry = parse_json((folder / ENTRY).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return entry if isinstance(entry, dict) else {}


# One text


@dataclass(frozen=True)
class _Task:
    """Hold a text to draw, the folder of its files, and the hash of all that they depend on."""

    text: CorpusText
    folder: Path
    fingerprint: str

    def drawn(self, entry: dict[str, Any]) -> DrawnText:
        """Return the text as drawn: its place in the corpus, and its entry."""
        text = self.text
        return DrawnText(text.index, text.source, text.line, self.folder.name, **entry)

    def find_done(self) -> DrawnText | None:
        """Return the text if it is drawn already with this fingerprint, and all its files are there; else None."""
        entry = _read_entry(self.folder)
        if entry.get("fingerprint") != self.fingerprint:
            return None
        # A file of another size was cut or replaced. A damaged entry fails in one of these ways.
        try:
            done = self.drawn(entry)
            is_whole = all(
                (self.folder / name).stat().st_size == size for name, size in done.files.items()
            )
        except (OSError, TypeError, AttributeError):
            return None
        return done if is_whole else None


@dataclass
class _Drawer:
    """Draw one text after the other in a worker, which gets a pickled copy and loads the model once.

    Attributes:
        source: The model.
        options: How texts are drawn.
        hashes: Known hashes of the model's files; see `models.files.HASHES`.
        model: The loaded model; None before `load`.
    """

    source: models.Source
    options: BatchOptions
    hashes: dict[tuple[Path, int, int], str]
    model: Model | None = None

    def load(self) -> None:
        """Load the model, unless that is done, and check that it has the chosen heads."""
        if self.model is not None:
            return
        import torch

        # Without this, matplotlib warns of fonts at each text.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        torch.set_num_threads(self.options.running.threads or 1)
        HASHES.update(self.hashes)
        self.model = self.options.loading.load(self.source)
        self.options.choice.within(self.model.info)

    def __call__(self, task: _Task) -> DrawnText | FailedText:
        """Draw a text, or return it as failed: then the files of an earlier run stay."""
        try:
            if task.folder.is_symlink():
                raise AttnscopeError(
                    f"{task.folder} is a link, which leads out of the batch", "remove it"
                )
            with replace_together(task.folder, earlier=_list_files(task.folder), last=ENTRY) as staged:
                return self._draw(task, staged)
        except Exception as error:
            # Whatever failed becomes one line and a hint.
            described = failure("", error)
            reason = AttnscopeError(described["error"], described["hint"])
            return _fail(task.text, str(reason))

    def _draw(self, task: _Task, folder: Path) -> DrawnText:
        """Write the files of a text into a folder."""
        model = self.model
        assert model is not None
        options = self.options
        maps = options.maps
        # Run the model, and change its maps as asked.
        text = task.text
        reading = read(
            model, Prompt(text.text or "", text.pair, chat=options.chat, generate=options.generate)
        )
        record = run_model(
            model, outline(model.info, reading, options.choice.within(model.info)), reading
        )
        record = apply_changes(record, maps)
        notes = list(record.run["notes"])
        shares: list[Path] = []
        if maps.between:
            try:
                shares = [find_shares(record, *maps.between.parts).save(folder / SHARES)]
            except AttnscopeError as error:  # of many texts, some lack a part
                notes.append(f"{error} here")
        query = maps.query
        if query is not None and not any(attention.queries.find(query) for attention in record.maps):
            notes.append(f"no token is {query!r} here")  # of many texts, some lack it
            query = None
        # Write figures and data. Threads that compress would take the cores of other workers.
        figures = [name for name in options.formats if name in FIGURE_FORMATS]
        others = [name for name in options.formats if name not in figures]
        files = write_pages(pages(record, options.style, query), folder, figures, threads=0)
        files = [*files, *write(record, folder, others), *shares]
        # Write the entry last: it lists the other files, by which the next run knows that the text is done.
        entry: dict[str, Any] = {
            "text": text.text or "",
            "tokens": reading.tokens.labels,
            "files": {path.name: path.stat().st_size for path in files},
            "model": model.info.name,
            "run": {
                name: record.run[name] for name in ("sha256", "engine", "dtype", "device", "versions")
            },
            "notes": notes,
            "fingerprint": task.fingerprint,
        }
        write_whole(folder / ENTRY, _encode(json.dumps(entry, ensure_ascii=False) + "\n"))
        return task.drawn(entry)
