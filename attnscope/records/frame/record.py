"""A frozen dataclass as a record, by `codec` and `checks`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from numpy.typing import NDArray

from attnscope.records.frame import checks, codec
from attnscope.results.record import Record


@dataclass(frozen=True, eq=False, repr=False)
class StudyRecord(Record):
    """What a study of texts found."""

    ASCII: ClassVar[bool] = True
    HOLDS: ClassVar[str] = ""

    run: Mapping[str, Any]
    corpus: Mapping[str, Any]
    options: Mapping[str, Any]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return bool(self.HOLDS) and not getattr(self, self.HOLDS)

    def describe(self) -> dict[str, Any]:
        """Return all fields, the schema first."""
        return {"schema": self.SCHEMA, **codec.describe(self)}

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return nothing."""
        return {}

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Self:
        """Return what `describe` described."""
        record: Self = codec.build(cls, described)
        checks.require_types(record)
        checks._require_metadata(record)
        return record
