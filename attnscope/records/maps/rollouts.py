"""What is left of the input tokens after several layers, by attention alone. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from attnscope.records.frame.checks import shaped
from attnscope.records.frame.codec import ARRAY, OMITTED, parts
from attnscope.records.frame.record import Record
from attnscope.records.maps.pictures import Picture
from attnscope.records.maps.tokens import Tokens
from attnscope.results.storage import finite, plain

METHODS = ("mean", "rollout")

_MAPS = shaped("n_layers tokens tokens", filled=True, **ARRAY)


@dataclass(frozen=True, eq=False, repr=False)
class Rollout(Record):
    """Attention rollout of one model on one text (Abnar & Zuidema 2020).

    Attributes:
        text: The text as given.
        tokens: Its tokens.
        kind: Whose attention it is: "encoder" or "decoder".
        residual: The share of the identity in each layer, for the residual connection.
        mean: What the heads of each layer attend to on average, (layer, query, key), float64; nothing added.
        rollout: How much of each input token is in each place after each layer, (layer, query, token), float64; rows
            sum to 1.
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        picture: Of a vision model: what it saw; the tokens are its patches. None = there is a text.
    """

    SCHEMA: ClassVar[str] = "attnscope.rollout/1"

    text: str
    tokens: Tokens
    kind: str
    residual: float
    mean: NDArray[np.float64] = field(metadata=_MAPS | {"weights": True})
    rollout: NDArray[np.float64] = field(metadata=_MAPS | {"weights": True})
    run: Mapping[str, Any]
    picture: Picture | None = field(default=None, metadata=parts(lambda *_: "pixels") | OMITTED)

    def of(self, method: str) -> NDArray[np.float64]:
        """Return the shares of "mean" or "rollout", (layer, query, token)."""
        return {"mean": self.mean, "rollout": self.rollout}[method]

    def require(self, query: str) -> tuple[int, ...]:
        """The places of the tokens that `query` names.

        Raises:
            AttnscopeError: There are none.
        """
        if places := self.tokens.find(query):
            return places
        raise self.tokens.refuse(query)

    @property
    def usual_scale(self) -> str:
        """The figure's largest; over a picture, each map's."""
        return "figure" if self.picture is None else "head"

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values; NaN becomes null."""
        described = self.describe()
        labels = {"tokens": self.tokens.labels, "record": {"tokens": described["tokens"]}}
        whole: dict[str, Any] = plain({**described, **self.arrays(), **labels}, finite)
        return whole

    @classmethod
    def rebuild(cls, described: Mapping[str, Any], held: Mapping[str, Any]) -> Self:
        """The rollout that `describe` and `arrays` were made of, or `as_json`."""
        if "mean" in described:  # JSON, whose `record` is no description of the rest
            described = {**described, "tokens": described["record"]["tokens"]}
        return super().rebuild(described, held)

    def require_whole(self) -> None:
        """Refuses tokens that do not fit the picture."""
        if self.picture is not None and np.prod(self.picture.grid) != int((~self.tokens.special).sum()):
            raise ValueError("its tokens are not the patches of its picture")
