"""What every study is asked with: which model and how it loads, which texts, which formats, which folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from attnscope import models
from attnscope.corpus import Corpus, Split
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.catalog import with_adapter


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded; see `attnscope.models.load`."""

    engine: str = "auto"
    device: str = "cpu"
    dtype: str = "float32"
    check: bool = True
    allow_pickle: bool = False
    trust_remote_code: bool = False
    device_map: str | None = None
    adapter: Path | None = None

    def __post_init__(self) -> None:
        models.require_known(self.engine, self.dtype)

    def resolve(self, spec: str) -> models.Source:
        """Finds the model that a name means, with the adapter that is asked for."""
        source = models.resolve(spec, allow_pickle=self.allow_pickle, trust_remote_code=self.trust_remote_code)
        return source if self.adapter is None else with_adapter(source, self.adapter)

    def load(self, spec: str | models.Source) -> models.Model:
        """Loads a model with these options."""
        return models.load(spec, **vars(self))


@dataclass(frozen=True)
class TextsWanted:
    """The texts that a study is to read.

    Attributes:
        text: One text; "-" reads stdin.
        files: Files and patterns instead; see `attnscope.Corpus`.
        split: How a text file is split into texts: "line", "paragraph" or "file".
        field: The field of jsonl, csv or parquet that holds the text.
    """

    text: str | None = None
    files: tuple[str, ...] = ()
    split: str = "line"
    field: str = "text"

    @property
    def given(self) -> bool:
        """Whether there is any text or file."""
        return self.text is not None or bool(self.files)

    def corpus(self) -> Corpus | list[str]:
        """The texts, read as they are used.

        Raises:
            UsageError: Not exactly one of text and files is given, or there is no such split.
        """
        if (self.text is not None) + bool(self.files) != 1:
            raise UsageError("give one of TEXT and --file", 'such as --file "corpus/*.txt"')
        if self.split not in get_args(Split):
            raise UsageError(f"there is no split {self.split!r}", f"choose one of {', '.join(get_args(Split))}")
        if self.files or self.text == "-":
            return Corpus(self.files or ["-"], split=self.split, field=self.field)  # type: ignore[arg-type]  # as above
        return [self.text or ""]


def require_writable(folder: Path) -> None:
    """Finds out before the model runs for minutes that nothing can be written; leaves no trace."""
    hint = "choose another folder with --out, or make room there"
    made: list[Path] = []
    try:
        made = [part for part in (folder, *folder.parents) if not part.exists()]
        if not made and not folder.is_dir():
            raise AttnscopeError(f"cannot write into {folder}: it is a file, not a folder", hint)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise AttnscopeError(f"cannot write into {folder}: {error.strerror or error}", hint) from None
    finally:
        for part in made:
            with contextlib.suppress(OSError):
                part.rmdir()


def others_in(folder: Path | None, written: Sequence[Path]) -> list[str]:
    """A note where a folder that was named holds files like those written into it that are of another run; else none.

    Args:
        folder: The folder; None = the run has one of its own.
        written: What was written.
    """
    if folder is None or not written:
        return []
    endings, own = {path.suffix for path in written}, {path.name for path in written}
    others = sorted(path.name for path in folder.iterdir() if path.suffix in endings and path.name not in own)
    if not others:
        return []
    count = "a file" if len(others) == 1 else f"{len(others)} files"
    return [f"{folder} also holds {count} that this run did not write, such as {others[0]}"]


def formats_again(out: Path | None, given: str | None, known: Sequence[str]) -> tuple[str, ...]:
    """The formats of files that a saved record is to be written to again; `text` is what is printed anyway.

    Args:
        out: The folder; None = nothing is written.
        given: A list such as `png,npz,text`; None = png if there is a folder.
        known: The formats that there are, but for `text`.

    Raises:
        UsageError: There is no such format, or no folder for it.
        AttnscopeError: The folder cannot be written.
    """
    names = [name for name in (given or "text" if out is None else given or "png").split(",") if name.strip()]
    files = [name for name in names if name.strip().lower() != "text"]
    if out is None:
        if files:
            raise UsageError("there is no folder to write files to", "give one with --out, or leave out --format")
        return ()
    wanted = named_formats(",".join(files), known) if files else ()
    require_writable(out)
    return wanted


def named_formats(given: str, known: Sequence[str]) -> tuple[str, ...]:
    """The formats in a list such as `png,npz`, each once.

    Raises:
        UsageError: There is no such format, or none is given.
    """
    return named_choices(given, known, "format")


def named_choices(given: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    """The names in a list such as `zero,mean`, each once.

    Raises:
        UsageError: There is no such name, or none is given.
    """
    names = tuple(dict.fromkeys(part.strip().lower() for part in given.split(",") if part.strip()))
    for name in names:
        if name not in known:
            raise UsageError(f"there is no {what} {name!r}", f"choose from {', '.join(known)}")
    if not names:
        raise UsageError(f"no {what} is given", f"choose from {', '.join(known)}")
    return names
