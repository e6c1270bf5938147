"""Options that mean the same in every command, and how their values are read."""

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnscope.errors import AttnscopeError, UsageError, safe

if TYPE_CHECKING:
    from attnscope.studies.texts import Progress as Done
    from attnscope.studies.texts import Report

_NUMBERS = re.compile(r"\d+(-\d+)?", re.ASCII)
_SPAN = re.compile(r"(\d*):(\d*)", re.ASCII)
_OBEYED = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
"""Controls, marks of direction and separators of lines, which json.dumps leaves as they are beyond ASCII."""

_HEAD = re.compile(r"L?(\d+)[H.:](\d+)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Saved:
    """A saved record, and how `attnscope show` is to show it; see its options."""

    record: Path
    out: Path | None
    formats: str | None
    query: str | None
    pick: str | None
    scale: str | None
    cmap: str
    measures: str | None
    json: bool
    quiet: bool


def numbers_from(given: str | None) -> tuple[int, ...] | None:
    """Numbers in a list such as `0,3-5`."""
    if given is None:
        return None
    found: list[int] = []
    for part in (part.strip() for part in given.split(",") if part.strip()):
        if not _NUMBERS.fullmatch(part):
            raise UsageError(f"{part!r} is not a number or a range", "layers and heads are chosen like this: 0,3-5")
        first, _, last = part.partition("-")
        stop = int(last or first)
        if stop < int(first) or stop > 9999:
            raise UsageError(f"{part!r} is not a range of layers or heads", "a range goes up, such as 3-5")
        found += range(int(first), stop + 1)
    if not found:
        raise UsageError("no layer or head is given", "layers and heads are chosen like this: 0,3-5")
    return tuple(dict.fromkeys(found))


def heads_from(given: str | None) -> tuple[tuple[int, int], ...] | None:
    """Single heads in a list such as `L3H1,L5H11`, as (layer, head)."""
    if given is None:
        return None
    found: list[tuple[int, int]] = []
    for part in (part.strip() for part in given.split(",") if part.strip()):
        match = _HEAD.fullmatch(part)
        if not match:
            raise UsageError(f"{part!r} is not a head", "single heads are chosen like this: L3H1,L5H11")
        found.append((int(match[1]), int(match[2])))
    if not found:
        raise UsageError("no head is given", "single heads are chosen like this: L3H1,L5H11")
    return tuple(dict.fromkeys(found))


def span_from(option: str, given: str | None) -> tuple[int, int | None] | None:
    """Numbers from a first one up to, but without, a last one: `1000:1064`, `:64`, `1000:`."""
    if given is None:
        return None
    match = _SPAN.fullmatch(given.strip())
    if not match or (not match[1] and not match[2]) or len(given) > 20:
        raise UsageError(f"{option} {given!r} is no range", "tokens are numbered from 0, from:to, such as 1000:1064")
    return int(match[1] or 0), int(match[2]) if match[2] else None


def refuse_beside(option: str, **others: object) -> None:
    """Refuses what cannot be given together with an option.

    Raises:
        UsageError: Something is given.
    """
    for name, given in others.items():
        if given:
            named = name if name.isupper() else f"--{name.replace('_', '-')}"
            raise UsageError(f"{named} cannot be given beside {option}", "leave out one of them")


def say(notes: Iterable[str], quiet: bool) -> None:
    """Notes for people, on stderr."""
    if not quiet:
        for note in notes:
            print(f"note: {one_line(note)}", file=sys.stderr)


@contextlib.contextmanager
def progress(quiet: bool, texts: str = "texts", tokens: str = "tokens") -> "Iterator[Report | None]":
    """A progress bar on stderr with tokens, tokens a second and the time left; only on a terminal."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from attnscope.views.plain_text import open_console

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    started = time.monotonic()
    with Progress(*columns, console=open_console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None)

        def report(done: "Done") -> None:
            rate = done.n_tokens / max(1e-9, time.monotonic() - started)
            total = None if done.share is None else 1.0
            told = f"{done.n_texts:,} {texts}, {done.n_tokens:,} {tokens}, {rate:,.0f} {tokens}/s"
            bar.update(task, description=told, total=total, completed=done.share or 0.0)

        yield report


@contextlib.contextmanager
def counting(quiet: bool, what: str) -> "Iterator[Callable[[int, int], None] | None]":
    """A progress bar on stderr for work whose steps are counted, with the time left; only on a terminal."""
    if quiet or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from attnscope.views.plain_text import open_console

    columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=open_console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


def fail_if_not_whole(corpus: Mapping[str, Any], run: Mapping[str, Any] | None = None) -> None:
    """Ends with exit status 1 where something could not be read or failed, 130 where the study was interrupted.

    The result has been printed and written by then: nothing is lost.
    """
    failures: list[dict[str, str]] = list((run or {}).get("failures", ()))
    problems: list[dict[str, Any]] = list(corpus.get("problems", ()))
    of = corpus.get("of")  # "pictures" or "recordings"; texts say nothing
    for problem in problems:
        where = f"{problem['source']}" + (f", line {problem['line']}" if problem["line"] is not None else "")
        print("skipped: " + one_line(f"{where}: {problem['reason']}"), file=sys.stderr)
    if not corpus.get("complete", True):
        print(
            f"note: incomplete: this is what {corpus['n_texts']:,} {of or 'texts'} say",
            file=sys.stderr,
        )
        if not failures:
            raise KeyboardInterrupt
    for failed in failures[:1]:
        kept = "what was measured before is in the result"
        raise AttnscopeError(
            f"{failed['step']} failed: {failed['error']}", "; ".join(filter(None, (failed["hint"], kept)))
        )
    if problems:
        one, several = (of[:-1], of) if of else ("part of the texts", "parts of the texts")
        what = f"{len(problems)} {one if len(problems) == 1 else several}"
        lost = any("not studied" in problem["reason"] for problem in problems)
        raise AttnscopeError(
            f"{what} could not be read{' or studied' * lost}", "all the rest was studied, and is in the result"
        )


def one_line(message: str) -> str:
    """A message in one line, with nothing in it that a terminal would obey: names and texts come from anywhere."""
    return safe(" ".join(message.split()))


def print_paths(paths: Iterable[str | Path]) -> None:
    """Prints the files that were written, one a line: as they are for programs, and as is safe on a terminal."""
    for path in paths:
        print(safe(str(path)) if sys.stdout is not None and sys.stdout.isatty() else path)


def print_json(document: str) -> None:
    """Prints a JSON document, which is UTF-8 whatever the terminal's encoding."""
    if sys.stdout is not None:
        sys.stdout.flush()
        # As JSON's own \u202e what terminals and JavaScript obey, and the bytes of file names that are no text.
        sys.stdout.buffer.write(_OBEYED.sub(_escaped, document).encode() + b"\n")


def _escaped(found: re.Match[str]) -> str:
    # Two of them for what is beyond U+FFFF, as JSON has it.
    units = found[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def print_document(document: Mapping[str, Any], paths: Iterable[Path], *, allow_nan: bool = True) -> None:
    """Prints a record as one JSON document, with the files that were written.

    Args:
        document: What the record says of itself.
        paths: The files.
        allow_nan: Whether a number may be none; else that is a ValueError.
    """
    from json import dumps

    whole = {**document, "files": [str(path) for path in paths]}
    print_json(dumps(whole, ensure_ascii=False, allow_nan=allow_nan))


Files = Annotated[
    list[str] | None,
    typer.Option(help="Files or patterns: txt, jsonl, csv, also .gz and .zst, parquet; may be given several times."),
]
Split = Annotated[str, typer.Option(help="What of a text file is one text: line, paragraph or file.")]
Field = Annotated[str, typer.Option(help="The field of jsonl, csv or parquet that holds the text.")]
Model = Annotated[
    str, typer.Option("-m", "--model", help="A known name (see `attnscope models`), a folder, or a Hub id.")
]
Engine = Annotated[
    str,
    typer.Option(
        help="native: attnscope's own attention, for BERT-family weights; hf: transformers; auto: native where it can."
    ),
]
Image = Annotated[
    Path | None,
    typer.Option(
        help="A photo, for vision transformers: attention is laid over it. --query is then CLS, REG0, a patch as "
        "ROW,COLUMN, or mean (over all patches).",
        show_default=False,
    ),
]
Layers = Annotated[str | None, typer.Option("-L", "--layers", help="Layers, such as 0,3-5.  [default: all]")]
Heads = Annotated[
    str | None, typer.Option("-H", "--heads", help="Heads of those layers, such as 1,8-10.  [default: all]")
]
Pick = Annotated[str | None, typer.Option("--pick", help="Single heads, such as L3H1,L5H11, in one figure.")]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="The folder to write to.  [default: attnscope-out/MODEL-TEXT-HASH]"),
]
RecordFormats = Annotated[
    str | None,
    typer.Option(
        "-f", "--format", help="Files to write: several of npz, csv, json, png, svg, pdf.  [default: npz,csv,png]"
    ),
]
Kind = Annotated[
    str | None, typer.Option(help="Of an encoder-decoder: encoder, decoder or cross attention alone.  [default: all]")
]
Scale = Annotated[
    str,
    typer.Option(
        help="What the darkest colour means: weight 1 (fixed), each head's largest (head), the figure's (figure)."
    ),
]
Cmap = Annotated[str, typer.Option(help="A matplotlib colormap, such as viridis or Greys.")]
Query = Annotated[
    str | None,
    typer.Option(help="Also show what this token attends to: a token, a word, or a place such as @3."),
]
Words = Annotated[bool, typer.Option("--words", help="Merge word pieces: sum over keys, mean over queries.")]
HideSpecial = Annotated[bool, typer.Option("--hide-special", help="Leave special tokens out and renormalise each row.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of paths.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No notes on stderr.")]
Device = Annotated[
    str, typer.Option(help="Where the model runs: cpu, cuda, cuda:1, mps; auto: the first there is of cuda, mps, cpu.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map", help="auto: spread a model that is too large over all devices (needs the extra accelerate)."
    ),
]
Dtype = Annotated[
    str, typer.Option(help="Precision of the model: float32, bfloat16, float16, float64. Sums are float32 or better.")
]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="Skip comparing a Hugging Face model with its own eager attention.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Load weights that are pickles; those can run any code on your machine.")
]
Executor = Annotated[
    str,
    typer.Option(help="Where workers live: local, on this machine; ray, on those of a Ray cluster (extra [ray])."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(help="Of the cluster, such as 10.0.0.1:6379.  [default: as Ray finds it, else one is started here]"),
]
Workers = Annotated[
    int | None,
    typer.Option(
        help="Workers that share the texts, each with its own model.  [default: this process; of Ray as many as fit]",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(help="Threads that each worker computes with; more than 1 for large models.  [default: 1]"),
]
Adapter = Annotated[
    Path | None,
    typer.Option(
        help="The folder of an adapter of peft, such as LoRA, to merge into the model (needs the extra peft).",
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
