"""Frozen results: what was measured, on what, by what. NumPy only; they load and draw without torch."""

from pathlib import Path

from attnscope.records.frame.kinds import file_of, kind_of_schema, load_named
from attnscope.records.frame.record import Record
from attnscope.results import reading

__all__ = ["Record", "file_of", "load_record"]


def load_record(path: str | Path) -> Record:
    """Reads a record of any kind, which it is known by, not by its name; without loss.

    An npz archive of bare arrays is read as well: `weights` and `tokens`, as `record_from_arrays` takes them.

    Args:
        path: The file, or the folder that a command wrote it into.

    Raises:
        AttnscopeError: The file is not there, damaged, or no record.
    """
    path = file_of(Path(path))
    found: Record | None = load_named("attnscope.questions.arrays:load_arrays")(path)
    if found is not None:
        return found
    with reading.reading(path, "attnscope record", "give what a command wrote with -o, such as heads.npz"):
        schema = reading.schema_of(path) or reading.read_arrays(path)[1]["schema"]
        kind: type[Record] = kind_of_schema(schema).record_class()
    return kind.read(path)
