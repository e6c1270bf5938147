"""Circuits that grow in training: small decoders with fixed seeds, trained on tasks whose mechanism is published.

    python -m benchmarks.known.grown         # trains all, a few minutes on one core, and writes grown.npz

The task says what must be attended to; which head does it, and which heads the task needs, is measured here by a
forward pass written out in NumPy, without attnscope. A head follows a rule if 0.6 of its mass lies on the rule's keys,
so that 0.5 does on other texts. It is in the circuit if the loss grows by a tenth of what all heads gain when its
output is replaced by its mean.
"""

import io
import json
import math
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.known.tools import Floats
from benchmarks.known.truth import KnownModel, Place, Rule, Text, Truth, WrongTruth, induction, offset

FILE = Path(__file__).with_name("grown.npz")
FOLLOWS, NEEDED = 0.6, 0.1
N_TEXTS, N_HELD_OUT = 120, 40

NAMES = ("Ann", "Ben", "Cat", "Dan", "Eve", "Fin", "Gus", "Hal")
NOUNS = ("apple", "bread", "cloud", "door", "earth", "fire", "glass", "house")
ASK, FIRST = "?", "<s>"


@dataclass(frozen=True)
class Drawn:
    """One sequence, and the places whose next word is asked for."""

    words: tuple[str, ...]
    asked: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """What a decoder learns.

    Attributes:
        name: What to call it.
        source: The paper that describes the mechanism.
        words: Its vocabulary.
        draw: Draws a sequence.
        rules: Which rules some head must follow, by layer; None = any layer.
        n_layers: Layers of the decoder, each of N_HEADS heads.
        steps: Steps of training.
        positions: As of `examples.decoder.decoder`.
    """

    name: str
    source: str
    words: tuple[str, ...]
    draw: Callable[[np.random.Generator], Drawn]
    rules: tuple[tuple[Rule, int | None], ...]
    n_layers: int = 1
    steps: int = 600
    positions: str = "learned"


def _chain(chance: np.random.Generator) -> Drawn:
    """Bigrams of a sequence's own (examples/induction.py)."""
    n, length = 8, 48
    following = chance.dirichlet(np.full(n, 0.3), n).cumsum(1)
    numbers = [int(chance.integers(n))]
    for drawn in chance.random(length - 1):
        numbers.append(min(n - 1, int((drawn > following[numbers[-1]]).sum())))
    return Drawn((FIRST, *(NOUNS[number] for number in numbers)), tuple(range(1, length)))


def _indirect_object(chance: np.random.Generator) -> Drawn:
    first, second = (str(name) for name in chance.choice(NAMES, 2, replace=False))
    subject, other = (first, second) if chance.random() < 0.5 else (second, first)
    filler = [str(word) for word in chance.choice(NOUNS, int(chance.integers(0, 5)))]
    words = (FIRST, *filler, first, "and", second, "went", subject, "gave", "to", other)
    return Drawn(words, (len(words) - 2,))


def _copy(chance: np.random.Generator) -> Drawn:
    name = str(chance.choice(NAMES))
    words = [str(word) for word in chance.choice(NOUNS, int(chance.integers(6, 12)))]
    words.insert(int(chance.integers(0, len(words))), name)
    more = [str(word) for word in chance.choice(NOUNS, int(chance.integers(2, 5)))]
    return Drawn((FIRST, *words, ASK, *more, ASK, name), (len(words) + 1, len(words) + len(more) + 2))


def _suppress(chance: np.random.Generator) -> Drawn:
    words = tuple(str(word) for word in chance.permutation([*NOUNS, *NAMES])[:12])
    return Drawn((FIRST, *words), tuple(range(1, 12)))


def _count(chance: np.random.Generator) -> Drawn:
    signs = [str(sign) for sign in chance.choice(["(", ")", *NOUNS[:3]], int(chance.integers(8, 15)))]
    balance = signs.count("(") - signs.count(")")
    return Drawn(
        (FIRST, *signs, ASK, "more" if balance > 0 else "fewer" if balance < 0 else "equal"),
        (len(signs) + 1,),
    )


def _from_asked(
    name: str, words: str, holds: Callable[[Text, int], bool], asks: Callable[[str], bool]
) -> Rule:
    """Keys before a query of some word."""

    def keys(text: Text) -> Any:
        is_key = np.array([place > 0 and holds(text, place) for place in range(text.n)])
        is_query = np.array([asks(token) for token in text.tokens])
        return is_query[:, None] & is_key & np.tri(text.n, k=-1, dtype=np.bool_)

    return Rule(name, words, keys)


def _is_other(text: Text, place: int) -> bool:
    """Return whether a name came once before "to"."""
    until = text.tokens.index("to")
    return (
        place < until
        and text.tokens[place] in NAMES
        and text.tokens[:until].count(text.tokens[place]) == 1
    )


N_HEADS, D_MODEL, LONGEST = 4, 64, 72

TASKS: tuple[Task, ...] = (
    Task(
        "induction",
        "Elhage et al. 2021; Olsson et al. 2022; Edelman et al. 2024",
        (FIRST, *NOUNS),
        _chain,
        ((offset(-1), 0), (induction(), 1)),
        n_layers=2,
        steps=700,
        positions="rotary",
    ),
    Task(
        "indirect object",
        "Wang et al. 2023",
        (FIRST, *NAMES, *NOUNS, "and", "went", "gave", "to"),
        _indirect_object,
        (
            (
                _from_asked(
                    "other name",
                    "the name that came once, for the query to",
                    _is_other,
                    lambda word: word == "to",
                ),
                None,
            ),
            (
                _from_asked(
                    "names",
                    "names, for the query to",
                    lambda text, place: text.tokens[place] in NAMES,
                    lambda word: word == "to",
                ),
                None,
            ),
        ),
        n_layers=2,
        steps=900,
    ),
    Task(
        "copier",
        "Elhage et al. 2021, section on copying",
        (FIRST, *NAMES, *NOUNS, ASK),
        _copy,
        (
            (
                _from_asked(
                    "name",
                    "capitalised words, for the query ?",
                    lambda text, place: text.tokens[place] in NAMES,
                    lambda word: word == ASK,
                ),
                None,
            ),
        ),
    ),
    Task("suppressor", "McDougall et al. 2023", (FIRST, *NAMES, *NOUNS), _suppress, ()),
    Task(
        "bracket counter",
        "Weiss et al. 2021; Yao et al. 2021",
        (FIRST, "(", ")", *NOUNS[:3], ASK, "more", "fewer", "equal"),
        _count,
        (
            (
                _from_asked(
                    "brackets",
                    "brackets, for the query ?",
                    lambda text, place: text.tokens[place] in "()",
                    lambda word: word == ASK,
                ),
                None,
            ),
        ),
        steps=1200,
    ),
)


def batch(task: Task, n: int, chance: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Token numbers (sequence, token), padded by a sequence's own last word, and which next words are asked for."""
    drawn = [task.draw(chance) for _ in range(n)]
    longest = max(len(one.words) for one in drawn)
    ids, asked = np.zeros((n, longest), np.int64), np.zeros((n, longest), np.bool_)
    for row, one in enumerate(drawn):
        numbers = [task.words.index(word) for word in one.words]
        ids[row] = numbers + [numbers[-1]] * (longest - len(numbers))
        asked[row, list(one.asked)] = True
    return ids, asked


def train(task: Task, seed: int = 0) -> Any:
    """Return a decoder that has learned a task; equal seeds give equal weights on one machine."""
    import torch

    from examples.decoder import decoder

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    network = decoder(
        task.words,
        n_layers=task.n_layers,
        n_heads=N_HEADS,
        d_model=D_MODEL,
        positions=task.positions,
        max_tokens=LONGEST,
        seed=seed,
    )
    optimizer = torch.optim.AdamW(network.parameters(), 0.003, betas=(0.9, 0.98), weight_decay=0.01)
    slower = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * max(0.0, 1 - step / task.steps) ** 0.5
    )
    chance = np.random.default_rng([seed, 5])
    for _ in range(task.steps):
        ids, asked = (torch.from_numpy(array) for array in batch(task, 64, chance))
        logits = network(ids)[:, :-1][asked[:, :-1]]
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][asked[:, :-1]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    torch.set_num_threads(threads)
    return network


# What is true of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Plain:
    """A decoder's forward pass, written out in float64: what attnscope is judged by must not be attnscope."""

    weights: dict[str, Floats]
    n_layers: int
    rotary: bool

    def run(
        self, ids: np.ndarray, means: "dict[Place, Floats] | None" = None
    ) -> tuple[list[Floats], list[Floats], Floats]:
        """Weights of each layer (sequence, head, query, key), outputs of its heads before W_O, and logits.

        Args:
            ids: (sequence, token).
            means: What is put in the place of some heads' outputs.
        """
        w, n = self.weights, ids.shape[1]
        stream = w["embed.weight"][ids]
        if not self.rotary:
            stream = stream + w["position.weight"][:n]
        maps, outputs = [], []
        for layer in range(self.n_layers):
            name = f"layers.{layer}"
            normed = self._norm(stream, f"{name}.attention_norm")
            q, k, v = (
                (normed @ w[f"{name}.attention.{part}_proj.weight"].T)
                .reshape(*ids.shape, N_HEADS, -1)
                .swapaxes(1, 2)
                for part in "qkv"
            )
            if self.rotary:
                q, k = _turned(q), _turned(k)
            scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
            scores = np.where(np.tri(n, dtype=np.bool_), scores, -np.inf)
            rows = np.exp(scores - scores.max(-1, keepdims=True))
            rows /= rows.sum(-1, keepdims=True)
            put = rows @ v
            for (of_layer, head), mean in (means or {}).items():
                if of_layer == layer:
                    put[:, head] = mean
            maps.append(rows)
            outputs.append(put)
            joined = put.swapaxes(1, 2).reshape(*ids.shape, -1)
            stream = stream + joined @ w[f"{name}.attention.out_proj.weight"].T
        return maps, outputs, self._norm(stream, "norm") @ w["unembed.weight"].T

    def _norm(self, x: Floats, name: str) -> Floats:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt(centred.var(-1, keepdims=True) + 1e-5)
        normed: Floats = scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]
        return normed

    def loss(
        self, ids: np.ndarray, asked: np.ndarray, means: "dict[Place, Floats] | None" = None
    ) -> float:
        """Mean cross-entropy of the words that are asked for."""
        logits = self.run(ids, means)[2][:, :-1][asked[:, :-1]]
        logits = logits - logits.max(-1, keepdims=True)
        chosen = np.take_along_axis(logits, ids[:, 1:][asked[:, :-1]][:, None], -1)[:, 0]
        return float(np.mean(np.log(np.exp(logits).sum(-1)) - chosen))


def _turned(x: Floats) -> Floats:
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[-2]), 10_000.0 ** (-np.arange(half) / half))
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass(frozen=True)
class Measured:
    """What the plain forward pass says of a trained decoder.

    Attributes:
        heads: Rules that heads follow, by their number among the task's, and the mass that they give these keys.
        circuit: Heads that the task needs.
        loss: Of the whole, and with every head replaced by its mean.
    """

    heads: tuple[tuple[int, int, int, float], ...]
    circuit: tuple[Place, ...]
    loss: tuple[float, float]


def measure(task: Task, weights: dict[str, Floats]) -> Measured:
    """Return which heads follow the task's rules, and which it needs."""
    plain = Plain(weights, task.n_layers, task.positions == "rotary")
    ids, asked = batch(task, 200, np.random.default_rng([9, 5]))
    maps, outputs, _ = plain.run(ids)
    places = [(layer, head) for layer in range(task.n_layers) for head in range(N_HEADS)]
    means = {(layer, head): outputs[layer][:, head].mean((0, 1)) for layer, head in places}
    whole, none = plain.loss(ids, asked), plain.loss(ids, asked, means)
    lost = {place: plain.loss(ids, asked, {place: means[place]}) - whole for place in places}
    circuit = tuple(place for place in places if lost[place] >= NEEDED * (none - whole))
    chance = np.random.default_rng([10, 5])
    texts = [Text(task.draw(chance).words) for _ in range(60)]
    follows = []
    for number, (rule, of_layer) in enumerate(task.rules):
        for layer, head in places:
            if of_layer not in (None, layer):
                continue
            masses = []
            for text in texts:
                rows = plain.run(np.array([[task.words.index(word) for word in text.tokens]]))[0][layer][
                    0, head
                ]
                named = rule.keys(text) & np.tri(text.n, dtype=np.bool_)
                masses += (rows * named).sum(1)[named.any(1)].tolist()
            if np.mean(masses) >= FOLLOWS:
                follows.append((number, layer, head, round(float(np.mean(masses)), 3)))
    return Measured(tuple(follows), circuit, (round(whole, 4), round(none, 4)))


def known_model(task: Task, weights: dict[str, Floats], told: Measured) -> KnownModel:
    """Return a trained decoder as a model whose heads are known.

    Raises:
        WrongTruth: The plain forward pass says something else than what was saved with the weights.
    """
    import torch

    from examples.decoder import decoder, wrap

    if (again := measure(task, weights)).heads != told.heads or again.circuit != told.circuit:
        raise WrongTruth(f"grown {task.name}: {again} is measured, {told} was saved")
    network = decoder(
        task.words,
        n_layers=task.n_layers,
        n_heads=N_HEADS,
        d_model=D_MODEL,
        positions=task.positions,
        max_tokens=LONGEST,
    )
    network.load_state_dict(
        {name: torch.tensor(array, dtype=torch.float32) for name, array in weights.items()}
    )
    chance = np.random.default_rng([11, 5])
    drawn = dict.fromkeys(task.draw(chance).words for _ in range(2 * (N_TEXTS + N_HELD_OUT)))
    # The first word is one of the decoder's own.
    texts = [Text(words, spelled=" ".join(words)) for words in drawn]
    rules: dict[Place, list[Rule]] = {}
    for number, layer, head, _ in told.heads:
        rules.setdefault((layer, head), []).append(task.rules[number][0])
    heads = {place: Truth(tuple(of), True, "grown", task.source) for place, of in rules.items()}
    example = task.draw(chance)
    asks_all = len(example.asked) >= len(example.words) - 2  # nothing foretells the first word
    return KnownModel(
        f"grown {task.name}",
        wrap(network),
        True,
        texts[N_HELD_OUT : N_HELD_OUT + N_TEXTS],
        texts[:N_HELD_OUT],
        heads,
        told.circuit,
        asks_all,
    )


def load(path: Path = FILE) -> list[tuple[Task, dict[str, Floats], Measured]]:
    """Return the decoders that were trained, and what was measured of them."""
    with np.load(path) as held:
        about = json.loads(bytes(held["about"]))
        made = []
        for task in TASKS:
            facts = about[task.name]
            weights = {
                name.partition("/")[2]: held[name].astype(np.float64)
                for name in held.files
                if name.startswith(f"{task.name}/")
            }
            told = Measured(
                tuple((a, b, c, d) for a, b, c, d in facts["heads"]),
                tuple((a, b) for a, b in facts["circuit"]),
                (facts["loss"][0], facts["loss"][1]),
            )
            made.append((task, weights, told))
    return made


def _train_by_number(number: int) -> dict[str, np.ndarray]:
    """Return the weights of a task, in half precision."""
    return {
        name: tensor.detach().numpy().astype(np.float16)
        for name, tensor in train(TASKS[number]).state_dict().items()
    }


def main() -> None:
    """Train all tasks and save them in half precision; what is known is measured of the saved weights."""
    arrays: dict[str, np.ndarray] = {}
    about: dict[str, Any] = {}
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        trained = list(pool.map(_train_by_number, range(len(TASKS))))
    for task, weights in zip(TASKS, trained, strict=True):
        told = measure(task, {name: array.astype(np.float64) for name, array in weights.items()})
        arrays |= {f"{task.name}/{name}": array for name, array in weights.items()}
        about[task.name] = {"heads": told.heads, "circuit": told.circuit, "loss": told.loss}
        print(task.name, told, flush=True)
    with FILE.open("wb") as file:
        written = io.BytesIO(json.dumps(about).encode()).getvalue()
        np.savez_compressed(file, about=np.frombuffer(written, np.uint8), **arrays)
    print(f"{FILE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
