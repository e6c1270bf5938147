"""Many texts in, a folder of figures out: as `heatmap` draws each, by several processes, and never twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import fields, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path

from attnscope import models
from attnscope.core.plain_torch import with_plain_torch
from attnscope.corpus import Corpus, CorpusText
from attnscope.errors import AttnscopeError
from attnscope.host import physical_bytes
from attnscope.models.catalog import verify
from attnscope.models.files import hashes
from attnscope.pages.gallery import page
from attnscope.questions.batch import Batch, DrawnText, FailedText
from attnscope.questions.maps import spans
from attnscope.results.file_sets import require_writable
from attnscope.studies.batch.folder import BatchFolder, folder_name
from attnscope.studies.batch.worker import BatchOptions, Done, Drawer, Task
from attnscope.studies.executors import Executor
from attnscope.studies.inputs.provenance import versions
from attnscope.studies.inputs.texts import Progress, Report
from attnscope.studies.workers import Workers

# What a process needs besides its model, and how often it holds the weights as large as they lie on disk.
_PROCESS_BYTES, _TIMES_WEIGHTS = 700e6, 2


@with_plain_torch
def batch(
    spec: str,
    texts: Corpus | Iterable[str],
    out: str | Path,
    options: BatchOptions | None = None,
    report: Report | None = None,
) -> Batch:
    """Draws every text into a folder of its own, with a manifest and an index.html of all.

    A second call with the same arguments skips finished texts: those of the same text, model, options and versions. So
    it completes a run that was interrupted or killed. The same texts give the same files, byte for byte, whatever the
    number of workers.

    Args:
        spec: The model, as `attnscope.load` takes it by name: each worker loads it.
        texts: The texts. Those of files are all held in memory; of stdin each is drawn as it comes, and let go.
        out: The folder. No other run may write into it at the same time.
        options: How they are drawn.
        report: Is told how far it is, after each text that was drawn.

    Returns:
        What became of each text. A text that fails does not end the run, nor does Ctrl-C lose what is done:
        `complete` is False then.

    Raises:
        AttnscopeError: Nothing can be drawn: no such model, layer or head, no text, a folder that cannot be written,
            or that holds figures of another model or other options.
    """
    options, out = options or BatchOptions(), Path(out)
    options.map_options()  # what makes no sense is refused at once
    if not isinstance(spec, str):
        raise AttnscopeError("a batch takes a model by its name", "each of its processes loads it")
    if isinstance(texts, str):
        raise AttnscopeError("a batch takes many texts, not one", "give a list, or a Corpus")
    streamed = isinstance(texts, Corpus) and "-" in texts.sources
    corpus_texts: Iterable[CorpusText] = texts if isinstance(texts, Corpus) else _as_corpus(texts)
    corpus_texts = corpus_texts if streamed else list(corpus_texts)
    require_writable(out)
    source = options.loading.resolve(spec)
    absolute = source if source.folder is None else replace(source, folder=source.folder.absolute())
    drawer = Drawer(absolute, options, hashes(), _describe_options(source, options))
    with BatchFolder(out) as folder:
        folder.require_ours()
        folder.sweep()
        plan = _Plan(folder, drawer, _common(source, options))
        todo: Iterator[Task] = plan.todo(corpus_texts)
        n_todo = None
        if not streamed:
            listed = list(todo)
            todo, n_todo = iter(listed), len(listed)
        first = next(todo, None)
        failure: Exception | None = None
        interrupted = False
        if first is not None:
            try:
                executor = _workers(options, n_todo, source).executor_on(options.loading.device)
                interrupted = not _draw(plan, executor, chain([first], todo), n_todo, report)
            except Exception as error:  # told when what was drawn before it has its index
                failure = error
        folder.sweep()  # a worker that was stopped leaves half a text
        texts_drawn, missing = plan.outcome()
        if failure is not None and not texts_drawn:
            raise failure
        unread = [FailedText(p.source, p.line, p.reason) for p in texts.problems] if isinstance(texts, Corpus) else []
        result = Batch(
            source.name, len(plan.tasks), texts_drawn, (*missing, *unread), len(texts_drawn) - len(plan.done_before)
        )
        folder.publish(result, page(result))
        if failure is not None:
            raise failure
        if interrupted and result.complete:  # more would have come of stdin
            raise KeyboardInterrupt
    return result


class _Plan:
    """What is to be drawn, and what became of it. Texts come one by one; those that are drawn are not held.

    Attributes:
        tasks: All texts so far, without what they say.
        done_before: Those that an earlier run drew, by index.
        failed: Why others could not be drawn, and what they say, by index.
    """

    def __init__(self, folder: BatchFolder, drawer: Drawer, common: bytes) -> None:
        self.folder, self.drawer, self._common = folder, drawer, common
        self.tasks: list[Task] = []
        self.done_before: dict[int, DrawnText] = {}
        self.failed: dict[int, tuple[str, str]] = {}

    def todo(self, texts: Iterable[CorpusText]) -> Iterator[Task]:
        """The texts to draw, as they come; refuses to lose figures of other options."""
        for text in texts:
            # Ray's workers stand elsewhere.
            task = _task(text, self.folder.path.absolute(), self._common)
            self.tasks.append(replace(task, text=None, ids=None))
            done = None if self.drawer.options.replace else _done(self.folder, task)
            if done is not None:
                self.done_before[task.index] = done
                continue
            if not self.drawer.options.replace:
                self.folder.require_same([task.folder.name], self.drawer.asked)
            earlier = self.folder.entry(task.folder.name)
            if earlier is not None and earlier.fingerprint != task.fingerprint:
                self.folder.withdraw()
            yield task

    def outcome(self) -> tuple[tuple[DrawnText, ...], list[FailedText]]:
        """What is drawn, and what could not be."""
        finished, missing = [], []
        for task in tuple(self.tasks):
            if task.index in self.failed:
                reason, text = self.failed[task.index]
                missing.append(FailedText(task.source, task.line, reason, task.index, text))
            elif (done := self.done_before.get(task.index) or _done(self.folder, task)) is not None:
                finished.append(done)
        return tuple(finished), missing


def _draw(plan: _Plan, executor: Executor, todo: Iterable[Task], n_todo: int | None, report: Report | None) -> bool:
    """Have workers draw the tasks; return whether they came to the end, which Ctrl-C prevents."""
    n_done = n_tokens = 0
    try:
        with closing(executor.map_blocks(plan.drawer, todo)) as outcomes:
            for outcome in outcomes:
                task = outcome.block
                done = Done(reason=outcome.lost) if outcome.lost else outcome.result
                if done.reason:
                    plan.failed[task.index] = done.reason, task.text or ""
                n_done += 1
                n_tokens += done.n_tokens
                if report is not None:
                    report(Progress(n_done, n_tokens, n_todo and n_done / n_todo))
    except KeyboardInterrupt:
        return False
    return True


def _as_corpus(texts: Iterable[str]) -> list[CorpusText]:
    listed = list(texts)
    for text in listed:
        if not isinstance(text, str):
            raise AttnscopeError(f"a text is a string, not {type(text).__name__}")
    if not listed:
        raise AttnscopeError("there is no text to draw", "give at least one")
    return [CorpusText(index, "texts", index + 1, text) for index, text in enumerate(listed)]


def _task(text: CorpusText, out: Path, common: bytes) -> Task:
    fingerprint = hashlib.sha256(common + text.digested()).hexdigest()
    named = text.written or "tokens"
    folder = out / folder_name(text.index, named)
    return Task(text.index, text.source, text.line, text.text, text.ids, folder, fingerprint, text.pair)


def _done(folder: BatchFolder, task: Task) -> DrawnText | None:
    name = task.folder.name
    return folder.done(name, task.fingerprint, index=task.index, source=task.source, line=task.line)


def _common(source: models.Source, options: BatchOptions) -> bytes:
    """A hash of all that files depend on besides the text: the model, the options, the versions."""
    # Who draws, and how often, makes no difference to what is drawn.
    plain = replace(options, workers=None, threads=1, executor="local", ray_address=None, replace=False)
    libraries = {**dict(versions()), **{name: version(name) for name in ("matplotlib", "pillow")}}
    parts = [source.name, _model_files(source), repr(plain), libraries]
    return hashlib.sha256(json.dumps(parts).encode("utf-8", "backslashreplace")).digest()


def _describe_options(source: models.Source, options: BatchOptions) -> dict[str, str]:
    """The model and the options that figures depend on, as a user gives them."""
    choice, loading = options.map_options().choice, options.loading
    options_given = {
        "--model": source.name,
        "weights": verify(source)[:12] if source.folder is not None else None,
        "--layers": choice.layers and spans(choice.layers),
        "--heads": choice.heads and spans(choice.heads),
        "--pick": choice.pick and ",".join(f"L{layer}H{head}" for layer, head in choice.pick),
        "--format": ",".join(options.formats),
        **{f"--{f.name.replace('_', '-')}": getattr(options.style, f.name) for f in fields(options.style)},
        **{f"--{name.replace('_', '-')}": getattr(options, name) for name in _SHOWN},
        "--from": options.between.from_part,
        "--to": options.between.to_part,
        **{f"--{f.name.replace('_', '-')}": getattr(loading, f.name) for f in fields(loading) if f.name in _RUN},
    }
    return {name: _as_text(value) for name, value in options_given.items()}


_SHOWN = ("query", "words", "hide_special", "without_sinks", "mean", "chat", "generate")
_RUN = ("engine", "device", "dtype", "device_map", "adapter")


def _as_text(value: object) -> str:
    if value is None:
        return "not given"
    return ("off", "on")[value] if isinstance(value, bool) else str(value)


def _model_files(source: models.Source) -> dict[str, str]:
    """Hashes of the files of a model: weights, configuration, tokenizer. A built-in model goes by its version."""
    if source.folder is None:
        return {}
    digests = {"weights": verify(source)}
    endings = (".json", ".txt", ".model", ".jinja", ".py", ".gguf", ".tiktoken")
    paths = [path for path in sorted(source.folder.iterdir()) if path.suffix in endings]
    if source.adapter is not None:
        paths += sorted(source.adapter.glob("adapter_*"))
    for path in paths:
        if path.is_file():
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _workers(options: BatchOptions, n_texts: int | None, source: models.Source) -> Workers:
    n = options.workers
    if n is None and options.executor == "local":
        n = _n_workers(n_texts, source)
    return Workers(source.spec, n, options.threads, options.executor, options.ray_address, options.loading)


def _n_workers(n_texts: int | None, source: models.Source) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = cores if n_texts is None else min(cores, n_texts)
    memory = physical_bytes()
    if memory is None:
        return most
    weights = sum(path.stat().st_size for path in source.folder.glob("*") if path.is_file()) if source.folder else 0
    return max(1, min(most, int(memory / (_PROCESS_BYTES + _TIMES_WEIGHTS * weights))))
