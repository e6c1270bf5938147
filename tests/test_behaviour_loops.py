"""The measures of what heads write, computed again from docs/measures.md in float64 and plain loops."""

from collections import defaultdict

import numpy as np
import pytest
import torch

import attnscope
from attnscope.models.own.decoder import OwnDecoder, own_decoder
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.writes.copy_targets import AMONG, N_CANDIDATES, RAISED

N_WORDS, N_HEADS = 14, 2


class Text:
    """One text of a decoder of two layers: its attention, and what each head adds to logits from each key."""

    def __init__(self, network: OwnDecoder, model: object, ids: list[int]) -> None:
        self.ids, self.places = ids, range(len(ids) - 1)
        record = attnscope.heatmap(model, " ".join(map(str, ids)))  # type: ignore[arg-type]
        self.A = {(layer, head): record.of(layer, head).astype(float) for layer in (0, 1) for head in range(N_HEADS)}
        stream, wrote = network.embed.weight[ids], {}
        for layer, block in enumerate(network.layers):
            values = block.attention.v_proj(block.attention_norm(stream))
            for head in range(N_HEADS):
                d = slice(head * values.shape[1] // N_HEADS, (head + 1) * values.shape[1] // N_HEADS)
                wrote[layer, head] = values[:, d] @ block.attention.out_proj.weight[:, d].T
                stream = stream + torch.from_numpy(self.A[layer, head]) @ wrote[layer, head]
        scale = (stream.var(-1, unbiased=False) + network.norm.eps).sqrt()
        unembed = network.unembed.weight - network.unembed.weight.mean(0)
        self.logits = (network.norm(stream) @ unembed.T).numpy()
        # (key, token), of a query to be divided by its scale
        self.g = {
            place: ((part - part.mean(-1, keepdim=True)) * network.norm.weight @ unembed.T).numpy()
            for place, part in wrote.items()
        }
        self.scale = scale.numpy()

    def adds(self, head: tuple[int, int], q: int) -> np.ndarray:
        """What a head adds to each logit from each key, without its weight: (key, token)."""
        return self.g[head][: q + 1] / self.scale[q]

    def found(self, token: int, q: int) -> list[int]:
        return [k for k in range(1, q + 1) if self.ids[k] == token]

    def matched(self, token: int, q: int, n: int | None = None, nearest: int | None = None) -> int | None:
        there = self.found(token, q)
        n, nearest = (len(there), there[-1]) if n is None or nearest is None else (n, nearest)
        rivals = sorted({*self.ids[1 : q + 1]} - {token, self.ids[q], self.ids[q + 1]})
        return min(
            rivals, default=None,
            key=lambda b: (abs(len(self.found(b, q)) - n), abs(self.found(b, q)[-1] - nearest), b),
        )  # fmt: skip

    def controls(self, wanted: dict[int, int]) -> dict[int, int]:
        """The other prediction at which each token is asked about."""
        taken: dict[int, int] = {}
        for q, token in wanted.items():
            there = self.found(token, q)
            free = [
                r for r in self.places
                if r != q and r not in taken.values() and token not in (self.ids[r], self.ids[r + 1])
                and self.found(token, r)
            ]  # fmt: skip
            if free:
                taken[q] = min(
                    free,
                    key=lambda r: (
                        abs(len(self.found(token, r)) - len(there)),
                        abs(r - self.found(token, r)[-1] - q + there[-1]), r,
                    ),
                )  # fmt: skip
        return {q: r for q, r in taken.items() if self.matched(wanted[q], r) is not None}

    def moved(self, head: tuple[int, int], q: int, token: int, other: int, keys: list[int]) -> np.ndarray:
        """Nats and weight on a token less those on the other one, and the attention excluding sinks."""
        row, adds = self.A[head][q], self.adds(head, q)
        nats = sum(row[k] * (adds[k, token] - adds[k, other]) for k in keys)
        weight = sum(row[k] for k in keys) - sum(row[k] for k in self.found(other, q))
        return np.array([nats, weight, row[1 : q + 1].sum()])

    def beyond_control(self, head: tuple[int, int], q: int, r: int, token: int) -> np.ndarray:
        here, there = (
            self.moved(head, at, token, other, self.found(token, at))
            for at in (q, r)
            if (other := self.matched(token, at)) is not None
        )
        mean = there[:2] / there[2] if there[2] else 0  # nothing there but the sink
        return np.array([*(here[:2] - mean * here[2]), here[2]])


def measures_of(texts: list[Text]) -> dict[tuple[str, tuple[int, int]], list[float]]:
    """Sum and count of each measure."""
    sums: dict[tuple[str, tuple[int, int]], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def put(name: str, head: tuple[int, int], moved: np.ndarray, sign: int = 1) -> None:
        for what, value, count in zip(
            ("nats", "weight", "share"), (sign * moved[0], *moved[1:]), (moved[2], moved[2], 1), strict=True
        ):
            sums[f"{name}_{what}", head][0] += value
            sums[f"{name}_{what}", head][1] += count

    for text in texts:
        ids = text.ids
        coming = {
            q: ids[q + 1] for q in text.places if text.found(ids[q + 1], q) and text.matched(ids[q + 1], q) is not None
        }
        for q, r in text.controls(coming).items():
            for head in text.A:
                put("copying", head, text.beyond_control(head, q, r, coming[q]))
        for q in text.places:
            after = [j + 1 for j in range(q - 1) if ids[j] == ids[q]]
            if not after:
                continue
            token = ids[after[-1]]
            keys = [k for k in range(1, q) if ids[k] == token and ids[k - 1] == ids[q]]
            if (other := text.matched(token, q, len(keys), after[-1])) is not None:
                for head in text.A:
                    put("induction", head, text.moved(head, q, token, other, keys))
        ranked = {
            q: sorted({*ids[1 : q + 1]} - {ids[q]}, key=lambda t, q=q: (-text.logits[q, t], t))[:N_CANDIDATES]
            for q in text.places
        }
        asked = [{q: some[n] for q, some in ranked.items() if n < len(some)} for n in range(N_CANDIDATES)]
        asked = [{q: t for q, t in wanted.items() if text.matched(t, q) is not None} for wanted in asked]
        controls = [text.controls(wanted) for wanted in asked]
        for head, A in text.A.items():
            rest = np.array([text.logits[q] - A[q, : q + 1] @ text.adds(head, q) for q in text.places])
            for q in text.places:
                raised = [
                    (rest[q, wanted[q]], wanted[q], where[q])
                    for wanted, where in zip(asked, controls, strict=True)
                    if q in where and rest[q, wanted[q]] - rest[where[q], wanted[q]] >= RAISED
                ]
                if raised and max(raised)[0] >= sorted(text.logits[q])[-AMONG]:
                    _, token, r = max(raised)
                    put("suppression", head, text.beyond_control(head, q, r, token), sign=-1)
    return sums


@pytest.mark.parametrize("seed", [0, 1])
def test_behaviour_is_measured_as_the_docs_say(seed: int) -> None:
    torch.manual_seed(seed)
    network = own_decoder(N_WORDS, n_layers=2, n_heads=N_HEADS, d_model=16, seed=seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(
                3
            )  # heads so sharp that some give others than the first token 1e-40, and logits of several nats
    chance = np.random.default_rng(seed)
    texts = []
    for _ in range(5):
        words = chance.integers(0, N_WORDS, int(chance.integers(7, 11))).tolist()
        texts.append([*words, *words, *chance.integers(0, N_WORDS, int(chance.integers(0, 6))).tolist()])
    texts[0][5:8] = [3, 3, 3]  # where the token at q came just before, too
    model = attnscope.load(network)
    found = attnscope.heads(model, [" ".join(map(str, ids)) for ids in texts], HeadsOptions(writes=True))
    with torch.no_grad():
        sums = measures_of([Text(network.double(), model, ids) for ids in texts])
    assert {name for name, _ in sums} >= {"copying_nats", "induction_nats", "suppression_nats"}
    for head in found.heads:
        for behaviour in ("copying", "induction", "suppression"):
            for what in ("nats", "weight", "share"):
                name = f"{behaviour}_{what}"
                total, count = sums.get((name, (head.layer, head.head)), (0.0, 0.0))
                if name not in head.measures:
                    assert not count
                    continue
                assert head.measures[name].count == pytest.approx(count, rel=1e-4), (head.name, name)
                if count:
                    told = head.measures[name].value
                    assert told == pytest.approx(total / count, rel=1e-3, abs=1e-4), (head.name, name)
