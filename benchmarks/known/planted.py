"""Planted heads: random rules, sharpness, noise and sinks, written into the weights of BERT, GPT-2 and Llama."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.known.families import (
    FAMILIES,
    Family,
    Floats,
    Scores,
    build,
    rotary_places,
    writer_of_the_token_before,
)
from benchmarks.known.truth import (
    KnownModel,
    Rule,
    Text,
    Truth,
    between,
    induction,
    last,
    offset,
    same_token,
)

N_PLACES, N_LAYERS, N_HEADS = 48, 2, 8
N_TEXTS, N_HELD_OUT = 48, 16
LEAST, EACH = 0.6, 0.2
"""Mass that a rule's keys get at least, where it speaks; and that each of two rules gets where both do."""

FIRST, LAST = "[CLS]", "[SEP]"
DIGITS, NAMES = tuple("234567"), ("Anna", "Bob", "Carl", "Dora", "Emil", "Fay")
PAIRS = {")": "(", "]": "["}
ENDS, NEWLINE = ".", "\n"
MARKS = (".", ",", ";")
NOUNS = (
    "apple",
    "bread",
    "cloud",
    "door",
    "earth",
    "fire",
    "glass",
    "house",
    "island",
    "jar",
    "king",
    "lamp",
    "moon",
    "night",
    "ocean",
    "paper",
    "queen",
    "river",
    "stone",
    "tree",
)
WORDS = (FIRST, LAST, *MARKS, NEWLINE, *PAIRS, *PAIRS.values(), *DIGITS, *NAMES, *NOUNS)
NUMBERS = {word: number for number, word in enumerate(WORDS)}
CLASSES: dict[str, tuple[str, ...]] = {
    "digits": DIGITS,
    "capitalised words": NAMES,
    "punctuation": (*MARKS, *PAIRS, *PAIRS.values()),
    "commas": (",",),
    "brackets": (*PAIRS, *PAIRS.values()),
    "nouns": NOUNS,
}


def draw_text(chance: np.random.Generator, both_ends: bool, longest: int = N_PLACES) -> Text:
    """Sentences of few different words, with brackets, commas and lines; what repeats can be matched."""
    few = [
        *chance.choice(NOUNS, 6, replace=False),
        *chance.choice(NAMES, 2, replace=False),
        *chance.choice(DIGITS, 2),
    ]
    words: list[str] = []
    while len(words) < longest - 14:
        sentence = [str(word) for word in chance.choice(few, chance.integers(4, 9))]
        if chance.random() < 0.6:
            closes = str(chance.choice(list(PAIRS)))
            start = int(chance.integers(1, len(sentence) - 2))
            stop = int(chance.integers(start + 1, len(sentence)))
            sentence = [
                *sentence[:start],
                PAIRS[closes],
                *sentence[start:stop],
                closes,
                *sentence[stop:],
            ]
        if chance.random() < 0.5:
            sentence.insert(int(chance.integers(2, len(sentence))), str(chance.choice([",", ";"])))
        words += [*sentence, ENDS, *([NEWLINE] if chance.random() < 0.6 else [])]
    if words[-1] == NEWLINE:
        words.pop()
    return Text((FIRST, *words[: longest - 2], *((LAST,) if both_ends else ())), int(both_ends))


def tokenizer(words: Sequence[str], last_token: str | None, first: str = FIRST) -> Any:
    """Return a tokenizer of words with blanks between them; special tokens stand around every text."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = tokenizers.Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=first)
    )
    made.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    ends = [(word, words.index(word)) for word in (first, last_token) if word]
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last_token}" if last_token else f"{first} $A", special_tokens=ends
    )
    names = {"cls_token": first, "sep_token": last_token} if last_token else {"bos_token": first}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


# Heads ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planted:
    """A rule, and the scores that make a head follow it, in nats at a sharpness of 1."""

    rule: Rule
    tokens: Floats
    before: Floats
    places: Floats
    idle: tuple[str, ...] = ()


def _tables() -> tuple[Floats, Floats, Floats]:
    return np.zeros((len(WORDS),) * 2), np.zeros((len(WORDS),) * 2), np.zeros(2 * N_PLACES - 1)


def _at(places: Floats, distance: int) -> int:
    return len(places) // 2 + distance


def _columns(words: Sequence[str]) -> list[int]:
    return [NUMBERS[word] for word in words]


def _plant_offset(by: int) -> Planted:
    tokens, before, places = _tables()
    places[_at(places, by)] = 1
    return Planted(offset(by), tokens, before, places)


def _plant_same() -> Planted:
    tokens, before, places = _tables()
    np.fill_diagonal(tokens[2:, 2:], 1)
    places[_at(places, 0)] = -2
    return Planted(same_token(), tokens, before, places)


def _plant_class(keys: str, queries: str | None) -> Planted:
    tokens, before, places = _tables()
    among = CLASSES[queries] if queries else WORDS[2:]
    tokens[np.ix_(_columns(among), _columns(CLASSES[keys]))] = 1
    words = f"{keys} from {queries}" if queries else keys
    rule = between("class", words, lambda query, key: query in among and key in CLASSES[keys])
    return Planted(rule, tokens, before, places, tuple(word for word in WORDS[2:] if word not in among))


def _plant_pairs(chance: np.random.Generator) -> Planted:
    """Return a word of its own for each word: no tool has a name for that."""
    tokens, before, places = _tables()
    order = chance.permutation(len(WORDS) - 2) + 2
    partner = {WORDS[int(a)]: WORDS[int(b)] for a, b in zip(order, np.roll(order, 1), strict=True)}
    for query, key in partner.items():
        tokens[NUMBERS[query], NUMBERS[key]] = 1
    rule = between(
        "pairs", "a partner of each word, drawn at random", lambda query, key: partner.get(query) == key
    )
    return Planted(rule, tokens, before, places)


def _plant_induction() -> Planted:
    tokens, before, places = _tables()
    np.fill_diagonal(before[2:, 2:], 1)
    places[_at(places, 0) :] = -2
    return Planted(induction(), tokens, before, places)


def _after(keys: str) -> Planted:
    tokens, before, places = _tables()
    before[:, _columns(CLASSES[keys])] = 1

    def named(text: Text) -> Any:
        after = np.array([False, *(word in CLASSES[keys] for word in text.tokens[:-1])])
        ordinary = np.arange(text.n) > 0
        return np.broadcast_to(after, (text.n, text.n)) & ordinary[:, None]

    return Planted(Rule("after_class", f"what stands after {keys}", named), tokens, before, places)


def _recent(places: Floats, own: bool) -> None:
    """The nearer, the more; nothing behind the query."""
    distance = np.arange(len(places)) - len(places) // 2
    places += np.where(distance > -(not own), -2.0, 0.05 * distance)


def _plant_last(name: str, words: str, keys: Sequence[str]) -> Planted:
    tokens, before, places = _tables()
    tokens[2:, _columns(keys)] = 1.5
    _recent(places, own=False)
    rule = last(
        name, words, lambda text, place: text.tokens[place] in keys, lambda query: True, own=False
    )
    return Planted(rule, tokens, before, places)


def _plant_start(name: str, words: str, ends: Sequence[str], never: Sequence[str]) -> Planted:
    """Return the start of the query's sentence or line: the last token that stands after an end."""
    tokens, before, places = _tables()
    before[2:, _columns((FIRST, *ends))] = 2
    tokens[:, _columns((FIRST, *never))] = -4
    tokens[np.ix_(_columns(never), range(len(WORDS)))] = 0
    _recent(places, own=True)

    def starts(text: Text, place: int) -> bool:
        return text.tokens[place - 1] in (FIRST, *ends) and text.tokens[place] not in never

    rule = last(name, words, starts, lambda query: query not in never, own=True)
    return Planted(rule, tokens, before, places, tuple(never))


def _plant_partner() -> Planted:
    tokens, before, places = _tables()
    for closes, opens in PAIRS.items():
        tokens[NUMBERS[closes], NUMBERS[opens]] = 2
    _recent(places, own=False)

    def keys(text: Text) -> Any:
        named = np.zeros((text.n, text.n), np.bool_)
        for closes, opens in PAIRS.items():
            named |= last(
                "", "", lambda t, p, o=opens: t.tokens[p] == o, lambda q, c=closes: q == c, own=False
            ).keys(text)
        return named

    rule = Rule("partner", "the bracket that a closing one closes", keys)
    return Planted(rule, tokens, before, places, tuple(word for word in WORDS[2:] if word not in PAIRS))


def _plant_sink() -> Planted:
    tokens, before, places = _tables()
    return Planted(Rule("sink", "the first token", _first), tokens, before, places)


def _first(text: Text) -> Any:
    named = np.zeros((text.n, text.n), np.bool_)
    named[:, 0] = True
    return named


Maker = Callable[[np.random.Generator], Planted]


def makers(family: Family, layer: int) -> dict[str, Maker]:
    """Return the rules that a layer of a family can follow, by name."""
    causal = family != "bert"
    sides = [-1, -2, -3, -4] + ([] if causal else [1, 2, 3, 4])
    far = [-6, -7, -8, -9] + ([] if causal else [6, 7, 8])
    of_class = ("digits", "capitalised words", "punctuation", "commas", "brackets")
    made: dict[str, Maker] = {
        "near offset": lambda chance: _plant_offset(int(chance.choice(sides))),
        "far offset": lambda chance: _plant_offset(int(chance.choice(far))),
        "self": lambda chance: _plant_offset(0),
        "same": lambda chance: _plant_same(),
        "class": lambda chance: _plant_class(str(chance.choice(of_class)), None),
        "class to class": lambda chance: _plant_class(
            str(chance.choice(of_class)), str(chance.choice(["nouns", "punctuation"]))
        ),
        "pairs": _plant_pairs,
        "partner": lambda chance: _plant_partner(),
        "last mark": lambda chance: _plant_last(
            "last", "the last punctuation mark", CLASSES["punctuation"]
        ),
        "sink": lambda chance: _plant_sink(),
    }
    if layer:
        made |= {
            "induction": lambda chance: _plant_induction(),
            "after a class": lambda chance: _after(str(chance.choice(of_class))),
            "sentence start": lambda chance: _plant_start(
                "sentence_start", "the start of its sentence", (ENDS, NEWLINE), (NEWLINE,)
            ),
            "line start": lambda chance: _plant_start(
                "line_start", "the start of its line", (NEWLINE,), ()
            ),
        }
    return made


MIXED = (("near offset", "same"), ("near offset", "class"), ("same", "class"))
"""Pairs of rules that one head may follow at once."""


def draw_head(
    chance: np.random.Generator, family: Family, layer: int, texts: Sequence[Text], source: str
) -> tuple[Truth, Scores]:
    """Return a head with one rule or two, as sharp as is drawn, with noise and perhaps a sink.

    Sharpness grows until the rule gets the mass that it must have for the truth to be one; scores are what the family
    can do, so that the mass is known before there is a model. What a family cannot do is drawn again: rotary positions
    make no offset narrow enough to stand beside every other rule.
    """
    while (drawn := _draw_once(chance, family, layer, texts, source)) is None:
        pass
    return drawn


def _draw_once(
    chance: np.random.Generator, family: Family, layer: int, texts: Sequence[Text], source: str
) -> tuple[Truth, Scores] | None:
    known = makers(family, layer)
    two = chance.random() < 0.2
    names = MIXED[chance.integers(len(MIXED))] if two else (str(chance.choice(list(known))),)
    parts = [known[name](chance) for name in names]
    rests = chance.random() < 0.5 or bool(parts[0].idle) or names[0] == "sink"
    sink = float(chance.uniform(1, 3)) if rests else 0.0
    noise_tokens = chance.normal(size=(len(WORDS),) * 2) * chance.uniform(0, 0.7)
    noise_places = chance.normal(size=2 * N_PLACES - 1) * chance.uniform(0, 0.5) * (family != "llama")
    sharpness, share = float(chance.uniform(3, 9)), float(chance.uniform(-0.5, 0.5))
    truth = Truth(tuple(part.rule for part in parts), rests, "planted", source)
    for _ in range(40):
        weights = [sharpness * (4 if part.rule.name in _RECENT else 1) for part in parts]
        if two:
            weights[1] += share
        scores = _scores(
            family, parts, weights, sink if names[0] != "sink" else sharpness, noise_tokens, noise_places
        )
        masses = [_masses(truth, scores, text, family != "bert") for text in texts]
        alone = [np.nanmean([of[number] for of, _ in masses]) for number in range(len(parts))]
        if np.nanmean([whole for _, whole in masses]) >= LEAST and (not two or min(alone) >= EACH):
            return truth, scores
        if two and min(alone) < EACH:
            share += 0.5 if alone[1] < alone[0] else -0.5
        sharpness *= 1.12
    return None


_RECENT = ("last", "partner", "sentence_start", "line_start")


def _scores(
    family: Family,
    parts: Sequence[Planted],
    weights: Sequence[float],
    sink: float,
    noise: Floats,
    of_places: Floats,
) -> Scores:
    tokens, before, places = (table.copy() for table in (noise, np.zeros_like(noise), of_places))
    for part, weight in zip(parts, weights, strict=True):
        tokens += weight * part.tokens
        before += weight * part.before
        places += weight * part.places
    # The first token is a key of no rule's: a sink lies above the keys that no rule names, and below the others.
    tokens[:, 0] += sink
    for part, weight in zip(parts, weights, strict=True):
        tokens[_columns(part.idle), 0] += 2.5 * weight
    return Scores(tokens, before, rotary_places(places)[1] if family == "llama" else places)


def _masses(truth: Truth, scores: Scores, text: Text, causal: bool) -> tuple[list[float], float]:
    """Of one text: the mass on each rule's keys where all rules speak, and on all keys where any does."""
    weights = scores.of([NUMBERS[word] for word in text.tokens], causal)
    seen = np.tri(text.n, dtype=np.bool_) if causal else np.ones((text.n, text.n), np.bool_)
    keys = [rule.keys(text) & seen for rule in truth.rules]
    both, either = np.logical_and.reduce([of.any(1) for of in keys]), np.logical_or.reduce(keys)
    means = [float((weights * of).sum(1)[both].mean()) if both.any() else np.nan for of in keys]
    speaks = either.any(1)
    return means, float((weights * either).sum(1)[speaks].mean()) if speaks.any() else np.nan


def plant(family: Family, seed: int) -> KnownModel:
    """Return a model of one family, all of whose heads are planted: 15, and the writer of the token before."""
    import attnscope

    chance = np.random.default_rng([seed, FAMILIES.index(family)])
    both_ends = family == "bert"
    texts = [draw_text(chance, both_ends) for _ in range(N_TEXTS + N_HELD_OUT)]
    source = f"{family}, seed {seed}"
    writer = writer_of_the_token_before(len(WORDS), N_PLACES)
    if family == "llama":
        writer = Scores(writer.tokens, writer.before, rotary_places(writer.places)[1])
    layers: list[list[Scores]] = [[writer], []]
    heads = {(0, 0): Truth((offset(-1),), True, "planted", source)}
    for layer in range(N_LAYERS):
        for head in range(len(layers[layer]), N_HEADS):
            heads[layer, head], scores = draw_head(chance, family, layer, texts[:8], source)
            layers[layer].append(scores)
    network = build(family, WORDS, layers, N_PLACES)
    model = attnscope.load(network.eval(), tokenizer(WORDS, LAST if both_ends else None))
    known = KnownModel(
        f"planted {source}", model, not both_ends, texts[:N_TEXTS], texts[N_TEXTS:], heads
    )
    _require_scores(known, layers)
    return known


def _require_scores(known: KnownModel, layers: Sequence[Sequence[Scores]]) -> None:
    """The model's own attention is what the planted scores make; rope's float32 cosines cost Llama two digits."""
    from benchmarks.known.truth import WrongTruth, attention_of

    text = known.held_out[0]
    (weights,) = attention_of(known, [text])
    numbers = [NUMBERS[word] for word in text.tokens]
    for layer, heads in enumerate(layers):
        for head, scores in enumerate(heads):
            wrong = float(np.abs(weights[layer, head] - scores.of(numbers, known.causal)).max())

            if wrong > (0.1 if known.name.startswith("planted llama") else 2e-3):
                raise WrongTruth(
                    f"{known.name} L{layer}H{head} differs from its planted scores by {wrong:.1e}"
                )
