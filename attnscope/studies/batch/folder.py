"""The folder of a batch: whose it is, what in it is done, what is left over from a run that was killed.

A text has a folder of its own, whose files appear together; one of them, `entry.json`, lists the others: where it is,
the text is done. So a run can be killed at any moment, and the next one knows what to do from what it finds. The
manifest and the index are made of the entries at the end. Those of an earlier run stay until then, unless a text is
drawn in another way than they say.
"""

from __future__ import annotations

import contextlib
import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from attnscope.errors import AttnscopeError
from attnscope.questions.batch import Batch, DrawnText
from attnscope.results.file_sets import OwnFiles, remove_unfinished, replace_together
from attnscope.results.kinds import KINDS
from attnscope.results.storage import csv_text, is_plain_file, write_whole
from attnscope.text import slug

MANIFEST, INDEX, ENTRY = "manifest.jsonl", "index.html", "entry.json"

SHARES = "shares.csv"
"""What heads give from one part of a text to another: of each text in its folder, and of all above."""

_SUMMARIES = OwnFiles(frozenset({MANIFEST, INDEX, SHARES}))
_PLACE = ("index", "source", "line")

_TEXT_FOLDER = re.compile(r"\d{5,}-[a-z0-9-]+")


def folder_name(index: int, text: str) -> str:
    """The folder of a text: `00007-the-first-words`; letters, digits and hyphens, whatever the text is."""
    return f"{index:05d}-{slug(text)}"


class BatchFolder:
    """The folder of a batch, while the block lasts; it is made if it is not there, and goes again if it stays empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._new_folders: list[Path] = []
        self._withdrawn: dict[str, bytes] = {}

    def __enter__(self) -> BatchFolder:
        self._new_folders = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AttnscopeError(
                f"cannot write into {self.path}: {error.strerror or error}", "choose another folder with --out"
            ) from None
        return self

    def __exit__(self, *raised: object) -> None:
        if raised[0] is None:
            return
        for name, content in self._withdrawn.items():
            with contextlib.suppress(AttnscopeError):
                write_whole(self.path / name, content)
        with contextlib.suppress(OSError):
            for folder in self._new_folders:
                folder.rmdir()

    def done(self, name: str, fingerprint: str, *, index: int, source: str, line: int) -> DrawnText | None:
        """The text in a folder, if it is done with this fingerprint and all its files are there."""
        entry = self.entry(name, index=index, source=source, line=line)
        if entry is None or entry.fingerprint != fingerprint:
            return None
        try:
            whole = all((self.path / name / file).stat().st_size == size for file, size in entry.files.items())
        except (OSError, ValueError):
            return None
        return entry if whole else None

    def entry(self, name: str, *, index: int = 0, source: str = "", line: int = 0) -> DrawnText | None:
        """The entry of a text's folder; None if there is no whole one."""
        return _read_entry(self.path / name, index=index, source=source, line=line)

    def require_same(self, folders: Iterable[str], options: Mapping[str, str]) -> None:
        """Refuses to draw into folders whose figures were drawn with other options, as those would be lost.

        Figures of the same options that are damaged, or of other versions of libraries, are no loss.
        """
        for folder in folders:
            if (entry := self.entry(folder)) is None:
                continue
            before = {name: entry.asked[name] for name in options if name in entry.asked}
            differ = [f"{name} {was}, now {options[name]}" for name, was in before.items() if was != options[name]]
            if entry.asked and not differ:
                continue
            what = "; ".join(differ) or "an earlier version of attnscope drew them, and did not say with which"
            raise AttnscopeError(
                f"{self.path} holds figures of other options: {what}",
                "choose another folder with --out, or give up those figures with --replace",
            )

    def require_ours(self) -> None:
        """Refuses a folder where a manifest or an index that no batch wrote has the name of one of ours."""
        for name, is_ours in ((MANIFEST, _is_manifest), (INDEX, _is_index), (SHARES, _is_shares)):
            path = self.path / name
            if is_plain_file(path) and not is_ours(path):
                raise AttnscopeError(
                    f"{path} is no file of a batch, and would be lost",
                    "choose another folder with --out, or move it away",
                )

    def sweep(self) -> None:
        """Removes what killed runs have left half-written."""
        for folder, own in ((self.path, _SUMMARIES), *((folder, own_files()) for folder in self._text_folders())):
            with contextlib.suppress(OSError):
                remove_unfinished(folder, own)

    def withdraw(self) -> None:
        """Removes the manifest and the index, which are out of date; they come back if the run fails altogether."""
        for name in (MANIFEST, INDEX):
            with contextlib.suppress(OSError):
                if is_plain_file(self.path / name):
                    self._withdrawn[name] = (self.path / name).read_bytes()
                (self.path / name).unlink(missing_ok=True)

    def publish(self, batch: Batch, index: str) -> list[Path]:
        """Writes the index and the manifest, and the shares of all texts if they have any; returns the first two."""
        shares: list[tuple[str, ...]] = [_PLACE]
        for drawn in batch.drawn:
            if SHARES in drawn.files:
                with (self.path / drawn.folder / SHARES).open(encoding="utf-8", newline="") as file:
                    header, *rows = csv.reader(file)
                shares[0] = (*_PLACE, *header)
                shares += [(str(drawn.index), drawn.source, str(drawn.line), *row) for row in rows]
        with replace_together(self.path, _SUMMARIES) as staged:
            write_whole(staged / INDEX, index.encode("utf-8", "backslashreplace"))
            if len(shares) > 1:
                write_whole(staged / SHARES, csv_text(shares).encode("utf-8", "backslashreplace"))
            # File names that are no text hold lone surrogates; this writes them as JSON's own \udc80.
            write_whole(staged / MANIFEST, batch.manifest().encode("utf-8", "backslashreplace"))
        return [self.path / INDEX, self.path / MANIFEST]

    def _text_folders(self) -> Iterator[Path]:
        for path in _entries(self.path):
            if _TEXT_FOLDER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                yield path


def require_own(folder: Path) -> None:
    """Refuses the folder of a text that is a link: what is written there would be written elsewhere."""
    if folder.is_symlink():
        raise AttnscopeError(f"{folder} is a link, which leads out of the batch", "remove it")


def own_files() -> OwnFiles:
    """Return the files of a text in its folder: a record of attention, figures, and the entry that lists them."""
    return OwnFiles(KINDS["heatmap"].named_files | {ENTRY, SHARES}, has_figures=True, index=ENTRY, listed=_files_of)


def _files_of(folder: Path) -> list[str]:
    """The files of the text that is drawn in a folder, as its entry lists them; empty without an entry."""
    entry = _read_entry(folder)
    return [] if entry is None else [*entry.files, ENTRY]


def _read_entry(folder: Path, *, index: int = 0, source: str = "", line: int = 0) -> DrawnText | None:
    """The entry of a text's folder; None if there is no whole one."""
    if folder.is_symlink() or not is_plain_file(folder / ENTRY):
        return None
    try:
        entry = (folder / ENTRY).read_text("utf-8")
        return DrawnText.from_entry(entry, index=index, source=source, line=line, folder=folder.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_manifest(path: Path) -> bool:
    """Whether a file is empty or begins as every manifest does."""
    begin = _begin(path, 10)
    return not begin or begin == b'{"index": '


def _is_index(path: Path) -> bool:
    """Whether a file is empty or bears the link to the manifest that every index has near its beginning."""
    begin = _begin(path, 65_536)
    return not begin or b"<a href=manifest.jsonl>manifest.jsonl</a>" in begin


def _is_shares(path: Path) -> bool:
    """Whether a file is empty or begins with the columns of ours."""
    begin = _begin(path, 99)
    return not begin or begin.startswith(",".join(_PLACE).encode())


def _begin(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
