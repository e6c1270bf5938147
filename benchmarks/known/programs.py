"""RASP programs whose heads are known: Tracr's examples, and cases of the kind that InterpBench is made of.

The examples follow Weiss et al. 2021 and Tracr's library (Lindner et al. 2023). InterpBench (Gupta et al. 2024) trains
on such cases; these are our own.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.known.rasp import (
    Op,
    Select,
    Value,
    aggregate,
    apply,
    indices,
    join,
    tokens,
    width,
)

LETTERS: tuple[Value, ...] = tuple("abcde")


@dataclass(frozen=True)
class Program:
    """One program to compile.

    Attributes:
        name: What to call it.
        output: What it computes.
        words: The words that it reads.
        longest: The longest sequence.
        distinct: Whether each word may come once alone.
    """

    name: str
    output: Op
    words: tuple[Value, ...] = LETTERS
    longest: int = 10
    distinct: bool = False


# Selects -----------------------------------------------------------------------------------------------------------


def shifted(by: int) -> Select:
    """The token at an offset; below 0 = before."""
    words = {-1: "the previous token", 1: "the next token"}.get(
        by, f"the token {abs(by)} {'before' if by < 0 else 'after'}"
    )
    return Select(indices, indices, lambda key, query: key == query + by, words)


def same() -> Select:
    """The same token, itself included."""
    return Select(tokens, tokens, operator.eq, "the same token")


def up_to_here() -> Select:
    """The token and all before it."""
    return Select(indices, indices, operator.le, "the token itself and all before")


def before() -> Select:
    """All tokens before."""
    return Select(indices, indices, operator.lt, "all tokens before")


def behind() -> Select:
    """All later tokens."""
    return Select(indices, indices, operator.gt, "all later tokens")


def word(letter: Value) -> Select:
    """One word, from everywhere."""
    return Select(tokens, tokens, lambda key, query: key == letter, f"the word {letter}")


def everything() -> Select:
    """All tokens."""
    return Select(tokens, tokens, lambda key, query: True, "all tokens alike")


def smaller() -> Select:
    """Words that sort before the query's."""
    return Select(tokens, tokens, operator.lt, "words that come before the query's in sorted order")


def at_place(place: int) -> Select:
    """One place, from everywhere."""
    return Select(indices, indices, lambda key, query: key == place, f"the word at place {place}")


def alike(function: Callable[[Value], Value], op: Op, words: str) -> Select:
    """Keys of the query's own kind."""
    return Select(op, op, lambda key, query: function(key) == function(query), words)


def is_in(letters: str) -> Callable[[Value], bool]:
    """Whether a word is one of some letters."""
    return lambda value: value in letters


def length() -> Op:
    """How long the sequence is."""
    return width(everything(), "length")


def reversed_place() -> Select:
    """The place as far from the end as the query from the start."""
    opposite = join(lambda n, i: n - i - 1 if n > i else None, length(), indices, "opposite place")
    return Select(indices, opposite, operator.eq, "the token at the opposite place")


def balance(opens: str, closes: str) -> tuple[Op, Op]:
    """The share of opening and of closing brackets up to here."""
    made = []
    for sign in (opens, closes):
        is_sign = apply(lambda value, sign=sign: int(value == sign), tokens, f"is {sign}", numerical=True)
        made.append(aggregate(up_to_here(), is_sign))
    return made[0], made[1]


# Programs ----------------------------------------------------------------------------------------------------------


def named() -> Iterator[Program]:
    """Tracr's examples, and cases by hand."""
    for by in (-1, -3, 1):
        yield Program(f"shift_by {by}", aggregate(shifted(by), tokens))
    hist = width(same(), "hist")
    yield Program("hist", hist)
    yield Program("is_repeated", apply(lambda n: n > 1, hist, "is repeated"))
    target = width(smaller(), "rank")
    by_rank = Select(target, indices, operator.eq, "the token whose rank is the query's place")
    yield Program("sort_unique", aggregate(by_rank, tokens), tuple("abcdefgh"), 8, True)
    yield Program("reverse", aggregate(reversed_place(), tokens), LETTERS, 8)
    opposite = aggregate(reversed_place(), tokens)
    yield Program("palindrome", join(lambda a, b: a == b, opposite, tokens, "is its opposite"), LETTERS, 8)
    for letters in ("a", "bcd"):
        is_one = apply(lambda value, letters=letters: int(value in letters), tokens, f"in {letters}", numerical=True)
        yield Program(f"frac_prevs {letters}", aggregate(up_to_here(), is_one))
    for pairs in (("()",), ("()", "{}")):
        yield Program(f"shuffle_dyck{len(pairs)}", _shuffle_dyck(pairs), tuple("".join(pairs)) + ("a",), 8)
    opens, closes = balance("(", ")")
    yield Program("pair_balance", join(lambda a, b: a > b, _is_more(opens), _is_more(closes), "more open"),
                  ("(", ")", "a"), 8)  # fmt: skip
    yield Program("count a", width(word("a")))
    few = Select(hist, hist, lambda key, query: key <= 2, "tokens that come twice at most")
    yield Program("count_less_freq", width(few), LETTERS[:4], 8)
    yield Program("length", length(), LETTERS, 8)
    yield Program("detect_pattern", _detect("abc"))
    yield Program("first_word", aggregate(at_place(0), tokens))
    last = Select(indices, length(), lambda key, query: key == query - 1, "the last word")
    yield Program("last_word", aggregate(last, tokens), LETTERS, 8)
    swap = Select(indices, indices, lambda key, query: key == query ^ 1, "the other word of its pair of places")
    yield Program("swap_pairs", aggregate(swap, tokens))
    half = Select(indices, indices, lambda key, query: key == query // 2, "the word at half its place")
    yield Program("half_place", aggregate(half, tokens))
    is_a = apply(lambda value: int(value == "a"), tokens, "is a", numerical=True)
    parity = alike(lambda i: i % 2, indices, "places of the same parity")
    yield Program("same_parity", aggregate(parity, is_a))
    yield Program("same_kind", width(alike(is_in("ae"), tokens, "vowels from vowels and consonants from consonants")))
    yield Program("rank", target)


def _is_more(op: Op) -> Op:
    return apply(lambda share: int(share > 0.2), op, f"{op.name} over 0.2")


def _shuffle_dyck(pairs: tuple[str, ...]) -> Op:
    """Whether a running balance of brackets is ever negative, seen from everywhere; as Weiss et al. 2021."""
    flags = [
        apply(lambda share: int(share > 0.3), part, f"{part.name} over 0.3") for p in pairs for part in balance(*p)
    ]
    worst = flags[0]
    for flag in flags[1:]:
        worst = join(lambda a, b: int(a != b), worst, flag, "parity")
    as_number = apply(lambda value: value, worst, "unbalanced here", numerical=True)
    everywhere = Select(indices, indices, lambda key, query: True, "all tokens alike")
    last = Select(indices, length(), lambda key, query: key == query - 1, "the last word")
    somewhere = apply(lambda share: share > 0, aggregate(everywhere, as_number), "unbalanced somewhere")
    return join(lambda a, b: a and not b, aggregate(last, worst), somewhere, "balanced")


def _detect(pattern: str) -> Op:
    whole = apply(lambda value: value == pattern[-1], tokens, f"is {pattern[-1]}")
    for by, letter in enumerate(reversed(pattern[:-1]), start=1):
        here = apply(lambda value, letter=letter: value == letter, tokens, f"is {letter}")
        whole = join(lambda a, b: bool(a and b), whole, aggregate(shifted(-by), here), "and")
    return whole


def drawn(seed: int, n_heads: int = 16) -> Program:
    """A random program: some selections, each turned into a flag, and the parity of all flags."""
    chance = np.random.default_rng([seed, 77])
    makers: list[Callable[[], Op]] = [
        *(lambda by=by: _flag_of(shifted(by), chance) for by in (-1, -2, -3, -4, -5, -6, -7, 1, 2, 3, 4, 5)),
        lambda: _many(same(), 1), lambda: _many(before(), 3), lambda: _many(behind(), 3),
        lambda: _many(up_to_here(), 4), lambda: _many(smaller(), 2),
        *(lambda letter=letter: _many(word(letter), 1) for letter in LETTERS[:3]),
        *(lambda few=few: _many(
            alike(is_in(few), tokens, f"words that agree with the query on being one of {', '.join(few)}"), 3)
          for few in ("ab", "ade")),
        *(lambda by=by: _many(alike(lambda i: i % by, indices, f"places that are equal modulo {by}"), 1)
          for by in (2, 3)),
        *(lambda place=place: _flag_of(at_place(place), chance) for place in (0, 1, 3)),
        lambda: _many(Select(tokens, tokens, operator.ne, "all other words"), 5),
    ]  # fmt: skip
    numbers = chance.permutation(len(makers))[:n_heads]
    flags = [makers[number]() for number in numbers]
    while len(flags) > 1:  # a tree, so that the compiled model stays shallow
        pairs = [flags[at : at + 2] for at in range(0, len(flags), 2)]
        flags = [join(lambda a, b: bool(a) != bool(b), *pair, "parity") if len(pair) > 1 else pair[0] for pair in pairs]
    return Program(f"drawn {seed}", flags[0])


def _flag_of(selector: Select, chance: np.random.Generator) -> Op:
    letters = "".join(chance.choice(list(LETTERS), 2, replace=False))
    here = apply(lambda value: value in letters, tokens, f"in {letters}")
    return aggregate(selector, here)


def _many(selector: Select, least: int) -> Op:
    return apply(lambda n: n > least, width(selector), f"over {least} {selector.words}")


N_DRAWN = 18


def programs() -> list[Program]:
    """All programs, in order."""
    return [*named(), *(drawn(seed) for seed in range(N_DRAWN))]
