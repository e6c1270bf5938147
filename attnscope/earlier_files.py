"""Files that a folder held before: of which other maps those are that would be replaced, and what changed or stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnscope.records.frame.kinds import KINDS, load_named
from attnscope.records.frame.reading import read_description
from attnscope.records.maps.head_maps import spans

if TYPE_CHECKING:
    from attnscope.records.frame.record import Record

_BRIEF = 60


def name_other_maps(record: Record, folder: Path, formats: Sequence[str], query: str | None) -> str:
    """Says that a folder's record is of other maps than the files that would be replaced; empty = it is not.

    Colours may change: what they replace can be drawn again from that record. Where no record tells, a note does.
    """
    names = {kind.file(ending) for kind in KINDS.values() if kind.glance for ending in kind.lossless}
    earlier = [path for name in sorted(names) if (path := folder / name).is_file()]
    if not earlier:
        return ""
    kind, stems = record.record_kind(), load_named("attnscope.views.maps.pages:stems")(record, query)
    written = [kind.file(name) for name in formats if name in kind.data]
    written += [f"{stem}.{name}" for stem in stems for name in formats if name in kind.figures]
    if not any((folder / name).is_file() for name in written):
        return ""
    now = _traits(record.describe())
    for path in earlier:
        before = _traits(read_description(path))
        differ = [f"{name} {was}, now {now[name]}" for name, was in before.items() if was != now.get(name, was)]
        if differ:
            return f"{path} is of other maps: {'; '.join(differ)}"
    return ""


def _traits(described: Mapping[str, Any]) -> dict[str, str]:
    """What maps are of, in short, by name; empty for what is no record of maps."""
    maps = described.get("maps")
    if not isinstance(maps, list) or not all(isinstance(one, Mapping) for one in maps):
        return {}
    traits: dict[str, Any] = {name: described.get(name) for name in ("text", "model", "sha256", "picture", "sound")}
    traits |= {"pictures": described.get("pictures")} if described.get("pictures") else {}
    traits |= {"heads": _heads_of(described.get("picked"), maps)}
    traits |= {"changes": described.get("changes"), "pooling": described.get("pool")}
    traits |= {"part": [one.get("part") or one.get("query_cell") for one in maps]}
    return {name: _brief(value).strip('"') if name == "heads" else _brief(value) for name, value in traits.items()}


def _heads_of(picked: Any, maps: Sequence[Mapping[str, Any]]) -> object:
    """The heads that maps are of, as a user writes them; of a damaged record whatever it says."""
    try:
        if picked:
            return ",".join(f"L{layer}H{head}" for layer, head in picked)
        return "; ".join(f"-L {spans(one['layers'])} -H {spans(one['heads'])}" for one in maps)
    except (TypeError, ValueError, LookupError):
        return [picked, [[one.get("layers"), one.get("heads")] for one in maps]]


def _brief(value: object) -> str:
    """A value in a line that is not too long, but no two alike."""
    text = dumps(value, ensure_ascii=False)
    return text if len(text) <= _BRIEF else f"{text[:_BRIEF]}… (#{sha256(text.encode()).hexdigest()[:6]})"


def hash_files(folder: Path, formats: Sequence[str]) -> dict[Path, bytes]:
    """Hashes of the files in a folder, of these formats."""
    if not folder.is_dir():
        return {}
    endings = {f".{name}" for name in formats}
    paths = [path for path in folder.iterdir() if path.suffix in endings and path.is_file()]
    return {path: sha256(path.read_bytes()).digest() for path in paths}


def note_others(folder: Path | None, written: Sequence[Path], before: Mapping[Path, bytes]) -> list[str]:
    """Notes where a folder that was named held figures, or still holds some, that are not those that were written."""
    if folder is None or not written:
        return []
    now = hash_files(folder, [path.suffix[1:] for path in written])
    endings, own = {path.suffix for path in written}, {path.name for path in written}
    others = sorted(path.name for path in folder.iterdir() if path.suffix in endings and path.name not in own)
    changed = sorted(path.name for path in written if path in before and before[path] != now.get(path))
    notes = []
    for names, what, rest in (
        (changed, "held", "that showed something else before, such as"),
        (others, "also holds", "that this run did not write, such as"),
    ):
        if names:
            count = "a file" if len(names) == 1 else f"{len(names)} files"
            notes.append(f"{folder} {what} {count} {rest} {names[0]}")
    return notes
