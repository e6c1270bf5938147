"""Draw many texts into one folder, as `heatmap` draws each, by several processes. Texts that are drawn are skipped.

Each text has a folder of its own, whose files appear together. One of them, `entry.json`, lists the others with a
fingerprint: a hash of all that they depend on. So a run can be killed at any moment, and the next run draws the texts
whose folder is missing, damaged or out of date.
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
from attnscope.questions.heatmap_figures import pages
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
from attnscope.studies.maps.running import outline, run_model
from attnscope.studies.maps.study import apply_changes
from attnscope.studies.workers import Workers
from attnscope.text import slug

MANIFEST = "manifest.jsonl"
INDEX = "index.html"
ENTRY = "entry.json"

SHARES = "shares.csv"
"""What heads give from one part of a text to another: a file in the folder of each text, and one of all texts."""

_SIGNATURES = {
    MANIFEST: b'"index": ',
    INDEX: b": what each head attends to</title>",
    SHARES: b"index,source,line",
}
"""The files that list all texts, and bytes near the beginning of each. A file without them is the user's, and stays."""

_PROCESS_BYTES = 700e6
"""The memory of a worker process without its model."""

_BYTES_PER_FILE_BYTE = 2
"""The memory of a loaded model, as a multiple of the size of its files."""


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
        options: How they are drawn; None = the defaults.
        report: Called after each text that was drawn.

    Returns:
        The texts that are drawn, and those that failed. A failed text does not end the run. After Ctrl-C `complete` is
        False.

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
    for name, signature in _SIGNATURES.items():
        require_replaceable(out / name, mark=signature)
    _remove_unfinished_files(out)
    source = options.loading.resolve(spec)
    workers = _choose_workers(options.running, source, options)
    executor = workers.executor_on(options.loading.device)
    # Ray's workers run in another folder.
    if source.folder is not None:
        source = replace(source, folder=source.folder.absolute())
    common_hash = _hash_all_but_the_text(source, options)

    # The result of each text by its index, in the order of the corpus; None = it is not drawn yet.
    results: dict[int, DrawnText | FailedText | None] = {}

    def tasks() -> Iterator[_Task]:
        """Read texts as workers need them, and yield those that are not drawn yet."""
        for text in listed_texts:
            folder = out.absolute() / folder_name(text.index, text.full_text)
            task = _Task(text, folder, hashlib.sha256(common_hash + text.bytes_to_hash()).hexdigest())
            results[text.index] = task.find_done()
            if results[text.index] is None:
                yield task

    # Draw them.
    n_new = 0
    n_tokens = 0
    complete = True
    error: Exception | None = None
    drawer = _Drawer(source, options, dict(SHA256_BY_FILE))
    try:
        with contextlib.closing(executor.map_blocks(drawer, tasks())) as outcomes:
            for n_done, outcome in enumerate(outcomes, 1):
                text = outcome.block.text
                # There is no result if the worker died: `give_up_reason` says why.
                result = outcome.result or _failed_text(text, outcome.give_up_reason)
                results[text.index] = result
                if isinstance(result, DrawnText):
                    n_new += 1
                    n_tokens += len(result.tokens)
                if report is not None:
                    report(Progress(n_done, n_tokens, share_read(listed_texts, text.index)))
    except KeyboardInterrupt:
        complete = False
    except Exception as raised:
        # It is raised again once the texts that are drawn are listed.
        error = raised
        complete = False

    # Remove the files of a text whose worker was stopped, and list all other texts.
    _remove_unfinished_files(out)
    drawn = [result for result in results.values() if isinstance(result, DrawnText)]
    failed = [result for result in results.values() if isinstance(result, FailedText)]
    if isinstance(texts, Corpus):
        failed += [
            FailedText(problem.source, problem.line, problem.reason) for problem in texts.problems
        ]
    finished = BatchRun(source.name, len(results), drawn, failed, n_new, complete)
    _write_lists(out, finished)
    if error is not None:
        raise error
    return finished


def folder_name(index: int, text: str) -> str:
    """Return the name of a text's folder, such as `00007-the-first-words`, of letters, digits and hyphens."""
    return f"{index:05d}-{slug(text)}"


def _write_lists(out: Path, finished: BatchRun) -> None:
    """Write the files that list all texts. If nothing was drawn before Ctrl-C, those of an earlier run stay."""
    if finished.drawn or finished.complete:
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
            # All files have the same header: write that of the first.
            if not rows:
                rows.append(("index", "source", "line", *header))
            rows += [(str(text.index), text.source, str(text.line), *share) for share in shares]
    if rows:
        write_whole(path, _encode(format_csv(rows)))


def _encode(content: str) -> bytes:
    """Encode a text in UTF-8. Lone surrogates, from file names that are not UTF-8, are escaped as in JSON."""
    return content.encode("utf-8", "backslashreplace")


def _failed_text(text: CorpusText, reason: str) -> FailedText:
    return FailedText(text.source, text.line, reason, text.index, text.text or "")


def _choose_workers(running: WorkerOptions, source: models.Source, options: BatchOptions) -> Workers:
    """Return the workers that are asked for; by default one per core, or as many as have room for a model in memory."""
    if running.workers is None and running.executor == "local":
        n_cores = (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        )
        # The size of the model's files; a built-in model has none.
        file_bytes = 0
        if source.folder is not None:
            file_bytes = sum(path.stat().st_size for path in source.folder.glob("*.*"))
        memory = physical_bytes() or float("inf")
        n_fitting = memory / (_PROCESS_BYTES + _BYTES_PER_FILE_BYTE * file_bytes)
        running = replace(running, workers=max(1, int(min(n_cores, n_fitting))))
    workers = running.share(source.spec, options.loading)
    # `share` returns None only for local work without a number of workers.
    assert workers is not None
    return workers


def _hash_all_but_the_text(source: models.Source, options: BatchOptions) -> bytes:
    """Hash what the files of all texts depend on: the model's files, the options and the versions of libraries."""
    # A built-in model has no files: it depends on attnscope's version alone.
    digests = {}
    if source.folder is not None:
        digests["weights"] = verify_sha256(source)
        suffixes = (".json", ".txt", ".model", ".jinja", ".py", ".tiktoken")
        paths = [path for path in sorted(source.folder.iterdir()) if path.suffix in suffixes]
        if source.adapter is not None:
            paths += sorted(source.adapter.iterdir())
        digests |= {str(path): file_sha256(path) for path in paths if path.is_file()}
    # Files do not depend on the workers that draw them.
    drawing = asdict(replace(options, running=WorkerOptions()))
    libraries = versions() | {name: version(name) for name in ("matplotlib", "pillow")}
    dependencies = json.dumps([source.name, digests, drawing, libraries], default=str)
    return hashlib.sha256(_encode(dependencies)).digest()


# The folder


def _remove_unfinished_files(out: Path) -> None:
    """Remove the half-written files of killed runs, in the folder and in those of the texts."""
    remove_unfinished(out)
    for folder in out.glob("[0-9]*-*"):
        if not folder.is_symlink():
            remove_unfinished(folder)


def _list_files(folder: Path) -> list[str]:
    """Return the names of a text's files, as the entry in its folder lists them; empty without a sound entry."""
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
    """Hold a text to draw, the folder of its files, and the hash of all that they depend on."""

    text: CorpusText
    folder: Path
    fingerprint: str

    def drawn(self, entry: dict[str, Any]) -> DrawnText:
        """Return the text as drawn. The entry in its folder has all other fields of `DrawnText`."""
        text = self.text
        return DrawnText(text.index, text.source, text.line, self.folder.name, **entry)

    def find_done(self) -> DrawnText | None:
        """Return the text if it is drawn already with this fingerprint and all its files are whole; else None."""
        entry = _read_entry(self.folder)
        if entry.get("fingerprint") != self.fingerprint:
            return None
        # A file of another size was cut off or replaced. The errors are those that a missing file or a damaged entry
        # raises.
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
    """Draw texts in a worker. Each worker gets a pickled copy, calls `load` once, then calls the copy for each text.

    Attributes:
        source: The model's source.
        options: How texts are drawn.
        hashes: Known hashes of the model's files; see `models.files.SHA256_BY_FILE`.
        model: The loaded model; None before `load`.
    """

    source: models.Source
    options: BatchOptions
    hashes: dict[tuple[Path, int, int], str]
    model: Model | None = None

    def load(self) -> None:
        """Load the model, unless it is loaded, and refuse heads that it does not have."""
        if self.model is not None:
            return
        import torch

        # Otherwise matplotlib warns about fonts at each text.
        logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
        torch.set_num_threads(self.options.running.threads or 1)
        SHA256_BY_FILE.update(self.hashes)
        self.model = self.options.loading.load(self.source)
        self.options.choice.within(self.model.info)

    def __call__(self, task: _Task) -> DrawnText | FailedText:
        """Draw a text, or return why that failed; the files of an earlier run then stay."""
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
            # Say any failure in one line, with a hint.
            entry = describe_failure("", error)
            reason = AttnscopeError(entry["error"], entry["hint"])
            return _failed_text(task.text, str(reason))

    def _draw(self, task: _Task, folder: Path) -> DrawnText:
        """Write the files of a text into a folder."""
        model = self.model
        assert model is not None
        options = self.options
        # Run the model, and change its maps as asked.
        text = task.text
        prompt = Prompt(text.text or "", text.pair, chat=options.chat, generate=options.generate)
        reading = read(model, prompt)
        maps = outline(model.info, reading, options.choice.within(model.info))
        record = apply_changes(run_model(model, maps, reading), options.maps)
        # A text that lacks a part or the query is drawn without it, with a note.
        notes = list(record.run["notes"])
        shares: list[Path] = []
        if options.between:
            try:
                shares.append(find_shares(record, *options.between.parts).save(folder / SHARES))
            except AttnscopeError as error:
                notes.append(f"{error} here")
        query = options.tokens.query
        if query is not None and not any(attention.queries.find(query) for attention in record.maps):
            notes.append(f"no token is {query!r} here")
            query = None
        # Write figures and data, without threads for compression: other workers need the cores.
        figures = [name for name in options.formats if name in FIGURE_FORMATS]
        others = [name for name in options.formats if name not in figures]
        files = write_pages(pages(record, options.style, query), folder, figures, threads=0)
        files += [*write_files(record, folder, others), *shares]
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
