"""Writes the sample pairs: `python sample_texts/pairs/make.py`. The same seed gives the same files."""

import json
import random
from collections.abc import Callable
from pathlib import Path

N_PAIRS = 100
NAMES = ("Mary", "John", "Tom", "James", "Anna", "Paul", "Peter", "David", "Sarah", "Emma", "Kate", "Mark", "Jack",
         "Lucy", "Alice", "Bob", "Michael", "Robert", "Daniel", "Laura")  # fmt: skip
PLACES = (
    "store",
    "garden",
    "park",
    "school",
    "station",
    "library",
    "market",
    "office",
    "beach",
    "house",
)
THINGS = ("drink", "book", "ring", "ball", "letter", "gift", "key", "flower", "map", "coat")
NOUNS = (
    "key",
    "book",
    "letter",
    "picture",
    "door",
    "report",
    "song",
    "story",
    "road",
    "box",
    "car",
    "map",
)
PLURALS = {"story": "stories", "box": "boxes"}
BESIDE = ("to the {}", "near the {}", "behind the {}", "beside the {}")
OTHERS = ("cabinet", "house", "garden", "school", "window", "table", "tree", "wall")
EVENTS = ("war", "project", "journey", "reign", "plague", "siege", "voyage", "drought")
WORDS = ("stone", "river", "green", "table", "light", "music", "paper", "horse", "glass", "bread", "winter", "silver",
         "engine", "doctor", "forest", "window", "mountain", "summer", "copper", "market")  # fmt: skip

Pair = dict[str, str | list[str]]


def indirect_object(chance: random.Random, number: int) -> Pair:
    """Who gets it: the name that comes once. ABB and BAB in turn (Wang et al. 2023)."""
    (giver, taker), place, thing = chance.sample(NAMES, 2), chance.choice(PLACES), chance.choice(THINGS)
    first, second = (taker, giver) if number % 2 else (giver, taker)
    start = f"When {first} and {second} went to the {place},"
    end = f"gave a {thing} to"
    return {
        "clean": f"{start} {giver} {end}",
        "corrupt": f"{start} {taker} {end}",
        "right": taker,
        "wrong": giver,
    }


def agreement(chance: random.Random, number: int) -> Pair:
    """The verb agrees with the subject, not with the nearer noun (after Bock & Miller 1991). Singular in every second.

    The nearer noun has the other number than the clean subject.
    """
    noun, beside, other = chance.choice(NOUNS), chance.choice(BESIDE), chance.choice(OTHERS)
    nouns, is_singular = PLURALS.get(noun, f"{noun}s"), number % 2
    end = beside.format(f"{other}s" if is_singular else other)
    one, several = f"The {noun} {end}", f"The {nouns} {end}"
    right, wrong = ("is", "are") if is_singular else ("are", "is")
    return {"clean": one if is_singular else several, "corrupt": several if is_singular else one, "right": right,
            "wrong": wrong}  # fmt: skip


def greater_than(chance: random.Random, number: int) -> Pair:
    """The year of an end is after that of the start (Hanna et al. 2023), by the decade: one digit is one token."""
    event, century, decade, year = (
        chance.choice(EVENTS),
        chance.randint(11, 18),
        chance.randint(2, 7),
        number % 10,
    )
    text = f"The {event} lasted from the year {century}{{}}{year} to the year {century}"
    digits = [str(digit) for digit in range(10)]
    return {"clean": text.format(decade), "corrupt": text.format(0), "right": digits[decade + 1 :],
            "wrong": digits[:decade]}  # fmt: skip


def induction(chance: random.Random, number: int) -> Pair:
    """What followed a word before follows it again (Olsson et al. 2022). In the corrupt text two words are exchanged.

    Then another word stood before the right answer, and no word that a head would copy has changed.
    """
    words = chance.sample(WORDS, 8)
    first, second = 1 + number % 3, 5
    changed = list(words)
    changed[first], changed[second] = words[second], words[first]
    again = " ".join(words[: first + 1])
    return {"clean": f"{' '.join(words)} {again}", "corrupt": f"{' '.join(changed)} {again}",
            "right": words[first + 1], "wrong": words[second + 1]}  # fmt: skip


KINDS: dict[str, Callable[[random.Random, int], Pair]] = {
    "indirect_object": indirect_object,
    "agreement": agreement,
    "greater_than": greater_than,
    "induction": induction,
}


def make(kind: str, n: int = N_PAIRS, seed: int = 0) -> list[Pair]:
    """Pairs of a kind, none twice."""
    chance, made, number = random.Random(f"{kind} {seed}"), {}, 0
    while len(made) < n:
        pair = KINDS[kind](chance, number)
        made.setdefault(str(pair["clean"]), pair)
        number += 1
    return list(made.values())


def main() -> None:
    """Writes all of them beside this file."""
    for kind in KINDS:
        lines = "".join(json.dumps(pair) + "\n" for pair in make(kind))
        Path(__file__).with_name(f"{kind}.jsonl").write_text(lines, "utf-8")


if __name__ == "__main__":
    main()
