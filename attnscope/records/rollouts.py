"""What is left of the input tokens after several layers, by attention alone: rollout and flow. NumPy only."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.maps import Tokens, require_whole_tokens, tokens_from_json
from attnscope.records.pictures import Picture, picture_from
from attnscope.records.reading import read_record, reading, require_run, require_types, require_weights
from attnscope.records.storage import finite, plain, write_whole

ROLLOUT_SCHEMA = "attnscope.rollout/1"
METHODS = ("mean", "rollout", "flow")


@dataclass(frozen=True, eq=False)
class Rollout:
    """Attention rollout and attention flow of one model on one text (Abnar & Zuidema 2020).

    Attributes:
        text: The text as given.
        tokens: Its tokens.
        kind: Whose attention it is: "encoder" or "decoder".
        residual: The share of the identity in each layer, for the residual connection.
        mean: What the heads of each layer attend to on average, (layer, query, key), float64; nothing added.
        rollout: How much of each input token is in each place after each layer, (layer, query, token), float64; rows
            sum to 1.
        flow: The most that can flow from each place of each layer to each input token, by itself,
            (layer, query, token), float64, 0 to 1; NaN in rows that were not asked for.
        run: What made it: model, sha256, engine, versions, dtype, device, notes ... Plain JSON values.
        picture: Of a vision model: what it saw; the tokens are its patches. None = there is a text.
    """

    text: str
    tokens: Tokens
    kind: str
    residual: float
    mean: NDArray[np.float64]
    rollout: NDArray[np.float64]
    flow: NDArray[np.float64]
    run: Mapping[str, Any]
    picture: Picture | None = None

    @property
    def flowing(self) -> tuple[int, ...]:
        """The tokens whose flow is known."""
        return tuple(np.flatnonzero(~np.isnan(self.flow[0, :, 0])).tolist())

    @property
    def flow_shares(self) -> NDArray[np.float64]:
        """The flow with each row divided by its sum, as the paper's own figures have it."""
        total = self.flow.sum(-1, keepdims=True)
        shares: NDArray[np.float64] = np.divide(self.flow, total, out=np.zeros_like(self.flow), where=total != 0)
        return shares

    def of(self, method: str) -> NDArray[np.float64]:
        """Shares that can be compared, (layer, query, token): "mean", "rollout", or "flow" (each row by its sum)."""
        return {"mean": self.mean, "rollout": self.rollout, "flow": self.flow_shares}[method]

    def require(self, query: str) -> tuple[int, ...]:
        """The places of the tokens that `query` names.

        Raises:
            AttnscopeError: There are none.
        """
        if found := self.tokens.find(query):
            return found
        labels = " ".join(dict.fromkeys(self.tokens.labels))
        raise AttnscopeError(f"no token is {query!r}", f"the tokens are: {labels[:300]}; or give a place, such as @3")

    def describe(self) -> dict[str, Any]:
        """All but the arrays, as plain JSON values."""
        return {
            "schema": ROLLOUT_SCHEMA,
            "text": self.text,
            "tokens": self.tokens.as_json(),
            "kind": self.kind,
            "residual": self.residual,
            "run": plain(self.run),
            **({} if self.picture is None else {"picture": self.picture.describe()}),
        }

    def as_json(self) -> dict[str, Any]:
        """All of it as plain JSON values; NaN becomes null."""
        described = self.describe()
        arrays = {method: plain(getattr(self, method), finite) for method in METHODS}
        return {
            "schema": ROLLOUT_SCHEMA,
            "run": described["run"],
            **described,
            "tokens": list(self.tokens.labels),
            **arrays,
            **({} if self.picture is None else {"pixels": self.picture.pixels.tolist()}),
            "record": {"tokens": described["tokens"]},
        }

    def save(self, path: str | Path) -> Path:
        """Writes the record, whole or not at all: `.npz` (`load` reads it back without loss) or `.json`."""
        path = Path(path)
        if path.suffix == ".json":
            content = json.dumps(self.as_json(), ensure_ascii=False, allow_nan=False)
            return write_whole(path, content.encode("utf-8", "backslashreplace"))
        if path.suffix != ".npz":
            raise AttnscopeError(f"a rollout is saved as .npz or .json, not {path.suffix or path.name!r}")
        held = io.BytesIO()
        described = np.frombuffer(json.dumps(self.describe()).encode(), np.uint8)
        arrays = {method: getattr(self, method) for method in METHODS}
        if self.picture is not None:
            arrays["pixels"] = self.picture.pixels
        np.savez(held, allow_pickle=False, record=described, **arrays)
        return write_whole(path, held.getvalue())


def load(path: str | Path) -> Rollout:
    """Reads a rollout that `Rollout.save` wrote, npz or json, without loss.

    Raises:
        AttnscopeError: The file is not there, damaged, or no such record.
    """
    path = Path(path)
    with reading(path, "record of rollout", "give the rollout.npz that `attnscope rollout` wrote"):
        data, held = read_record(path, ROLLOUT_SCHEMA)
        if "mean" in data:  # JSON, whose `record` is no description of the rest
            data = data | {"tokens": data["record"]["tokens"]}
        arrays = {method: np.array(held[method], np.float64) for method in METHODS}
        tokens = tokens_from_json(data["tokens"])
        n = len(tokens)
        if any(a.ndim != 3 or a.shape != (len(arrays["mean"]), n, n) or not a.size for a in arrays.values()):
            raise ValueError("its arrays do not fit its tokens")
        picture = picture_from(data.get("picture"), held.get("pixels"))
        if picture is not None and picture.grid[0] * picture.grid[1] != int((~tokens.special).sum()):
            raise ValueError("its tokens are not the patches of its picture")
        mean, rollout, flow = (arrays[method] for method in METHODS)
        found = Rollout(
            str(data["text"]), tokens, str(data["kind"]), float(data["residual"]), mean, rollout, flow,
            dict(data["run"]), picture,
        )  # fmt: skip
        require_types(found)
        require_run(found.run)
        require_whole_tokens(tokens)
        require_weights(found.mean)
        require_weights(found.rollout)
    return found
