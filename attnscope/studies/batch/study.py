"""Draw many texts into one folder with several processes, each text as `attnscope heatmap` draws it.

Each text has a folder of its own. All files of a text appear in it at the same moment. One of them, `entry.json`, lists
the other files with a fingerprint: a hash of everything that they depend on. So a run can be killed at any moment: the
next run skips the texts that are drawn, and draws those whose folder is missing, damaged or out of date.

*Shares* say how much attention heads give from one part of a text to another, as the option --between asks. A *worker*
is a process with a model of its own.
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
from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.drawing.files import write_pages
from attnscope.errors import AttnscopeError, parse_json
from attnscope.host import physical_bytes
from attnscope.models.catalog import verify_sha256
from attnscope.models.files import SHA256_BY_FILE, file_sha256
from attnscope.models.info import versions
from attnscope.models.model import Model
from attnscope.output import write_files
from attnscope.pages.gallery import build_gallery
from attnscope.questions.batch import BatchRun, DrawnText, FailedText
from attnscope.questions.heatmap_figures import draw_pages
from attnscope.questions.shares import find_shares
from attnscope.results.kinds import FIGURE_FORMATS
from attnscope.results.storage import (
    format_csv,
    remove_unfinished,
    replace_together,
    require_replaceable,
    require_writable,
    write_whole,
)
from attnscope.studies.batch.options import BatchOptions
from attnscope.studies.failures import describe_failure
from attnscope.studies.inputs.options import WorkerOptions
from attnscope.studies.inputs.reading import Prompt, read
from attnscope.studies.inputs.texts import Progress, ReportProgress, share_read, texts_of
from attnscope.studies.maps.running import make_empty_record, run_model
from attnscope.studies.maps.study import apply_changes
from attnscope.studies.workers import Workers
from attnscope.text import slug

MANIFEST = "manifest.jsonl"
INDEX = "index.html"
ENTRY = "entry.json"

SHARES = "shares.csv"
"""The shares of attention between parts of a text: one file in the folder of each text, and one for all texts."""

_SIGNATURES = {
    MANIFEST: b'"index": ',
    INDEX: b": what each head attends to</title>",
    SHARES: b"index,source,line",
}
"""File that lists all texts -> bytes near its beginning. A file without these bytes is the user's, and stays."""

_WORKER_BYTES = 700e6
"""The memory of a worker process without its model."""

_BYTES_PER_FILE_BYTE = 2
"""The memory of a loaded model, as a multiple of the size of its files."""


# Inside, the caller's autocast, inference mode and default device are switched off.
@with_default_torch
def batch(
    spec: str,
    texts: Corpus | Sequence[str],
    out: str | Path,
    options: BatchOptions | None = None,
    report: ReportProgress | None = None,
) -> BatchRun:
    """Draw every text into a folder of its own, and list all of them in a manifest and an index.html.

    A second call skips texts that are drawn already with the same model, options and versions. So it completes a run
    that was interrupted or killed. The same texts give the same files, byte for byte, whatever the number of workers.

    Args:
        spec: The model by its name, as `attnscope.load` takes it: each worker loads it.
        texts: The texts; a text from stdin is drawn as soon as it arrives.
        out: The folder. No other run may write into it at the same time.
        options: How texts are drawn; None = the defaults.
        report: Called after each text of this run.

    Returns:
        The texts that are drawn, and the texts that failed. A failed text does not end the run. After Ctrl-C,
        `complete` is False.

    Raises:
        AttnscopeError: Nothing can be drawn: no such model, layer or head, no text, a folder that cannot be written.
    """
    if not isinstance(spec, str):
        raise AttnscopeError("a batch takes a model by its name", "each of its processes loads it")
    options = options or BatchOptions()
    out = Path(out)
    # Refuse wrong texts, folders and models before anything is drawn.
    listed_texts = texts_of(texts)
    _prepare_folder(out)
    source = options.loading.resolve(spec)
    workers = _choose_workers(options.running, source, options)
    executor = workers.executor_on(options.loading.device)
    # Workers of Ray run in another working directory, where a relative path would not be found.
    if source.folder is not None:
        source = replace(source, folder=source.folder.absolute())
    common_hash = _hash_all_but_the_text(source, options)

    # Index of a text -> its result, in the order of the corpus; None = the text is not drawn yet.
    results: dict[int, DrawnText | FailedText | None] = {}

    def make_tasks() -> Iterator[_Task]:
        """Read texts as workers need them, and yield a task for each text that is not drawn yet."""
        for text in listed_texts:
            folder = out.absolute() / folder_name(text.index, text.full_text)
            task = _Task(text, folder, hashlib.sha256(common_hash + text.bytes_to_hash()).hexdigest())
            results[text.index] = task.find_drawn()
            if results[text.index] is None:
                yield task

    # Draw the texts. Closing the outcomes stops the workers, also after an error.
    n_fresh = 0
    n_tokens = 0
    is_complete = True
    error: Exception | None = None
    drawer = _Drawer(source, options, dict(SHA256_BY_FILE))
    try:
        with contextlib.closing(executor.map_blocks(drawer, make_tasks())) as outcomes:
            for n_done, outcome in enumerate(outcomes, 1):
                # The block of texts that a worker gets at once is here a `_Task`, with one text.
                text = outcome.block.text
                # If the worker died, there is no result, and `death_reason` says why.
                result = outcome.result or _make_failed_text(text, outcome.death_reason)
                results[text.index] = result
                if isinstance(result, DrawnText):
                    n_fresh += 1
                    n_tokens += len(result.tokens)
                if report is not None:
                    report(Progress(n_done, n_tokens, share_read(listed_texts, text.index)))
    except KeyboardInterrupt:
        is_complete = False
    except Exception as raised:
        # List the texts that are drawn before the error is raised again.
        error = raised
        is_complete = False

    # Remove the files of a text whose worker was stopped, and list all other texts.
    _remove_unfinished_files(out)
    drawn = [result for result in results.values() if isinstance(result, DrawnText)]
    failed = [result for result in results.values() if isinstance(result, FailedText)]
    failed += _list_unreadable_texts(texts)
    finished = BatchRun(source.name, len(results), drawn, failed, n_fresh, is_complete)
    _write_lists(out, finished)
    if error is not None:
        raise error
    return finished


def folder_name(index: int, text: str) -> str:
    """Return the name of a text's folder, such as `00007-the-first-words`, of letters, digits and hyphens."""
    return f"{index:05d}-{slug(text)}"


def _prepare_folder(out: Path) -> None:
    """Refuse a folder that cannot be written or would lose a file of the user, and remove half-written files."""
    require_writable(out)
    for name, signature in _SIGNATURES.items():
        require_replaceable(out / name, mark=signature)
    _remove_unfinished_files(out)


def _list_unreadable_texts(texts: Corpus | Sequence[str]) -> list[FailedText]:
    """Return the entries of a corpus that could not be read as texts; a sequence of strings has none."""
    problems = texts.problems if isinstance(texts, Corpus) else ()
    return [FailedText(problem.source, problem.line, problem.reason) for problem in problems]


def _write_lists(out: Path, finished: BatchRun) -> None:
    """Write the files that list all texts. If Ctrl-C came before any text was drawn, the earlier lists stay."""
    if finished.drawn or finished.complete:
        # Write into a temporary folder, `staged`. Its files move into `out` together when the block ends.
        with replace_together(out) as staged:
            write_whole(staged / INDEX, _encode(build_gallery(finished)))
            write_whole(staged / MANIFEST, _encode(finished.manifest()))
            _write_shares(out, finished.drawn, staged / SHARES)


def _write_shares(out: Path, drawn: Sequence[DrawnText], path: Path) -> None:
    """Write one file with the shares of all texts, if any text has shares."""
    rows: list[tuple[str, ...]] = []
    for text in drawn:
        if SHARES in text.files:
            with (out / text.folder / SHARES).open(encoding="utf-8", newline="") as file:
                header, *shares = csv.reader(file)
            # All files have the same header: write it once.
            if not rows:
                rows.append(("index", "source", "line", *header))
            rows += [(str(text.index), text.source, str(text.line), *share) for share in shares]
    if rows:
        write_whole(path, _encode(format_csv(rows)))


def _encode(content: str) -> bytes:
    """Encode a text in UTF-8. Lone surrogates, from file names that are not UTF-8, are escaped as in JSON."""
    return content.encode("utf-8", "backslashreplace")


def _make_failed_text(text: CorpusText, reason: str) -> FailedText:
    return FailedText(text.source, text.line, reason, text.index, text.text or "")


def _choose_workers(running: WorkerOptions, source: models.Source, options: BatchOptions) -> Workers:
    """Return the workers that the options ask for.

    By default they are local: one per core, or fewer if memory has no room for a model in each.
    """
    if running.workers is None and running.executor == "local":
        n_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        # The size of the model's files; a built-in model has no folder.
        file_bytes = 0
        if source.folder is not None:
            file_bytes = sum(path.stat().st_size for path in source.folder.glob("*.*"))
        # If the size of memory is unknown, it sets no limit.
        memory_bytes = physical_bytes() or float("inf")
        max_workers = memory_bytes / (_WORKER_BYTES + _BYTES_PER_FILE_BYTE * file_bytes)
        running = replace(running, workers=max(1, int(min(n_cores, max_workers))))
    workers = running.make_workers(source.spec, options.loading)
    # `make_workers` returns None only for local work without a number of workers, which is set above.
    assert workers is not None
    return workers


def _hash_all_but_the_text(source: models.Source, options: BatchOptions) -> bytes:
    """Hash what the drawings of every text depend on: the model's files, the options and the versions of libraries."""
    # A built-in model has no files: it changes only with attnscope's version.
    digests = {}
    if source.folder is not None:
        digests["weights"] = verify_sha256(source)
        suffixes = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
        paths = [path for path in sorted(source.folder.iterdir()) if path.suffix in suffixes]
        if source.adapter is not None:
            paths += sorted(source.adapter.iterdir())
        digests |= {str(path): file_sha256(path) for path in paths if path.is_file()}
    # Drawings do not depend on the workers: replace their options by the defaults.
    drawing = asdict(replace(options, running=WorkerOptions()))
    libraries = versions() | {name: version(name) for name in ("matplotlib", "pillow")}
    dependencies = json.dumps([source.name, digests, drawing, libraries], default=str)
    return hashlib.sha256(_encode(dependencies)).digest()


# The folder


def _remove_unfinished_files(out: Path) -> None:
    """Remove the half-written files of killed runs, in the folder and in the folders of its texts."""
    remove_unfinished(out)
    for folder in out.glob("[0-9]*-*"):
        # A link may lead to files that no batch wrote.
        if not folder.is_symlink():
            remove_unfinished(folder)


def _list_files(folder: Path) -> list[str]:
    """Return the names of a text's files, as the entry in its folder lists them; empty without a valid entry."""
    files = _read_entry(folder).get("files")
    return [*files, ENTRY] if isinstance(files, dict) else []


def _read_entry(folder: Path) -> dict[str, Any]:
    """Return the entry in a text's folder; empty if there is none, or it is damaged."""
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
    """Hold a text to draw, the folder of its files, and the hash of everything that these files depend on."""

    text: CorpusText
    folder: Path
    fingerprint: str

    def make_drawn_text(self, entry: dict[str, Any]) -> DrawnText:
        """Return the text as drawn. The keys of the entry in its folder are the other fields of `DrawnText`."""
        text = self.text
        return DrawnText(text.index, text.source, text.line, self.folder.name, **entry)

    def find_drawn(self) -> DrawnText | None:
        """Return the text as an earlier run drew it; None if its fingerprint differs, or a file is missing or cut."""
        entry = _read_entry(self.folder)
        if entry.get("fingerprint") != self.fingerprint:
            return None
        # A file of another size was cut off or replaced. A missing file raises OSError, and a damaged entry raises
        # TypeError or AttributeError.
        try:
            drawn = self.make_drawn_text(entry)
            is_undamaged = all(
                (self.folder / name).stat().st_size == size for name, size in drawn.files.items()
            )
        except (OSError, TypeError, AttributeError):
            return None
        return drawn if is_undamaged else None


@dataclass
class _Drawer:
    """Draw texts in a worker. Each worker gets a pickled copy, calls `load` once, then calls the copy for each text.

    Attributes:
        source: Where the model's files are.
        options: How texts are drawn.
        hashes: Hashes of the model's files that the main process computed, so that workers need not do it again; see
            `models.files.SHA256_BY_FILE`.
        model: The loaded model; None before `load`.
    """

    source: models.Source
    options: BatchOptions
    hashes: dict[tuple[Path, int, int], str]
    model: Model | None = None

    def load(self) -> None:
        """Load the model, unless it is loaded, and refuse chosen heads that the model does not have."""
        if self.model is not None:
            return
        import torch

        # Without this, matplotlib warns about fonts at each text.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        torch.set_num_threads(self.options.running.threads or 1)
        SHA256_BY_FILE.update(self.hashes)
        self.model = self.options.loading.load(self.source)
        self.options.choice.within(self.model.info)

    def __call__(self, task: _Task) -> DrawnText | FailedText:
        """Draw a text, or return why that failed. After a failure, the files of an earlier run stay."""
        try:
            if task.folder.is_symlink():
                raise AttnscopeError(
                    f"{task.folder} is a link, which leads out of the batch", "remove it"
                )
            with replace_together(
                task.folder, old_names=_list_files(task.folder), index_name=ENTRY
            ) as staged:
                return self._draw(task, staged)
        except Exception as error:
            # One text must not end the run, whatever its error. `AttnscopeError` puts the error and hint into one line.
            # The name of the step, the first argument, is not used.
            failure = describe_failure("", error)
            reason = AttnscopeError(failure["error"], failure["hint"])
            return _make_failed_text(task.text, str(reason))

    def _draw(self, task: _Task, folder: Path) -> DrawnText:
        """Write the files of a text into a folder."""
        model = self.model
        assert model is not None
        options = self.options
        # Run the model, and apply the changes to its attention maps that the options ask for.
        text = task.text
        prompt = Prompt(text.text or "", text.pair, chat=options.chat, generate=options.generate)
        reading = read(model, prompt)
        maps = make_empty_record(model.info, reading, options.choice.within(model.info))
        record = apply_changes(run_model(model, maps, reading), options.maps)
        # A text may lack a part of --between, or the token of --query. Draw it without, and say so in a note.
        notes = list(record.run["notes"])
        share_files: list[Path] = []
        if options.between:
            try:
                share_files.append(find_shares(record, *options.between.parts).save(folder / SHARES))
            except AttnscopeError as error:
                notes.append(f"{error} here")
        query = options.tokens.query
        if query is not None and not any(attention.queries.find(query) for attention in record.maps):
            notes.append(f"no token is {query!r} here")
            query = None
        # Write figures and data, without threads for compression: other workers need the cores.
        figure_formats = [name for name in options.formats if name in FIGURE_FORMATS]
        data_formats = [name for name in options.formats if name not in figure_formats]
        files = write_pages(draw_pages(record, options.style, query), folder, figure_formats, threads=0)
        files += [*write_files(record, folder, data_formats), *share_files]
        # Write the entry last. It tells the next run that the text is drawn, and which files it has.
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
        return task.make_drawn_text(entry)
