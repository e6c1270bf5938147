"""Features of the user's own, for descriptions: patterns that are looked for in words, and zones."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from attnscope.annotated.texts import ZONE
from attnscope.errors import UsageError
from attnscope.studies.describe.features import Feature, Flags, TextFacts, catalogue

_ARROW = re.compile(r"(?:^|\s)>(?:\s|$)")


def own_features(given: Sequence[str]) -> list[Feature]:
    """Features of the user's, each as `own_feature`.

    Raises:
        UsageError: One is none; or two have one name, or one has that of a feature of the catalogue.
    """
    made = [own_feature(one) for one in given]
    ours = {feature.name for feature in catalogue(())}
    taken: set[str] = set()
    for feature in made:
        if feature.name in ours:
            raise UsageError(f"attnscope has a feature {feature.name!r} itself", "give yours another name")
        if feature.name in taken:
            raise UsageError(f"there are two features {feature.name!r}", "give each of yours a name of its own")
        taken.add(feature.name)
    return made


def own_feature(given: str) -> Feature:
    """A feature of the user's: `name=pattern` for keys that it is found in, `name=pattern > pattern` for queries too.

    The blanks around `>` tell it from one that a pattern holds, as words hold no blanks. Patterns are Python's regular
    expressions; they are looked for in the word that a token is part of, as it is written in the text.

    Raises:
        UsageError: It is none.
    """
    name, equals, pattern = given.partition("=")
    name = name.strip()
    if not (equals and name and pattern):
        raise UsageError(f"the feature {given!r} has no name or no pattern", "such as months=(?i)january|february")
    parts = [part.strip() for part in _ARROW.split(pattern)]
    if len(parts) > 2 or not all(parts):
        raise UsageError(
            f"the feature {name!r} is not of one pattern, or of two with ' > ' between", "such as verbs=^they$ > ed$"
        )
    try:
        patterns = [re.compile(part) for part in parts]
    except re.error as error:
        raise UsageError(f"the pattern of the feature {name!r} is no regular expression: {error}", "") from None

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        found = np.broadcast_to(_matches(facts, patterns[-1]), (len(queries), facts.n))
        return found & _matches(facts, patterns[0])[queries][:, None] if len(parts) > 1 else found

    return Feature(name, name, "from" if len(parts) > 1 else "key", 2, of, source="given")


def zone_feature(kind: str) -> Feature:
    """The feature of keys in a zone, such as "zone:answer"; annotations have zones as kinds of words."""

    def of(facts: TextFacts, queries: NDArray[np.int64]) -> Flags:
        return np.broadcast_to(facts.of_kind.get(kind, np.zeros(facts.n, np.bool_)), (len(queries), facts.n))

    return Feature(kind, f"the {kind.removeprefix(ZONE)} zone", "key", 3, of)


def _matches(facts: TextFacts, pattern: re.Pattern[str]) -> Flags:
    """Tokens of the words in which a pattern is found."""
    found = np.zeros(facts.n, np.bool_)
    for group in facts.tokens.word_groups():
        places = [t for t in group if not facts.tokens.special[t]]
        if places:
            start, stop = int(facts.tokens.offsets[places[0], 0]), int(facts.tokens.offsets[places[-1], 1])
            spelled = facts.tokens.text[start:stop] if start >= 0 else "".join(facts.stripped[t] for t in places)
            found[places] = pattern.search(spelled) is not None
    return found
