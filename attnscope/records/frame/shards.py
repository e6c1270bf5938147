"""Shards of a corpus: which a record holds, which are missing, and whether their study was interrupted or failed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_SHARD = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,8})")
_MOST_NAMED = 8
COUNTS = ("n_texts", "n_tokens", "n_chunked")
"""What of a corpus adds up over its shards."""


def shards_note(corpus: Mapping[str, Any]) -> str:
    """Such as "1 of 2 shards: 2/2 is missing"; empty where a record is of the whole corpus, or does not tell."""
    given = corpus.get("shards")
    held = [_SHARD.fullmatch(str(one)) for one in given] if isinstance(given, list | tuple) else []
    numbers = {int(one[1]) for one in held if one}
    of = {int(one[2]) for one in held if one}
    if len(of) != 1 or (n := of.pop()) == len(numbers):
        return ""
    n_missing = n - len(numbers)
    named: list[str] = []
    for number in range(1, n + 1):
        if number not in numbers:
            named.append(f"{number}/{n}")
        if len(named) == _MOST_NAMED:
            break
    more = f" and {n_missing - len(named):,} more" if n_missing > len(named) else ""
    return f"{len(numbers)} of {n:,} shards: {', '.join(named)}{more} {'is' if n_missing == 1 else 'are'} missing"


def is_part(corpus: Mapping[str, Any]) -> bool:
    """Whether a record is of shards of a corpus, or of all of it, and can be added up with others."""
    given = corpus.get("shards")
    named = isinstance(given, list | tuple) and all(_SHARD.fullmatch(str(one)) for one in given)
    return bool(given) and named and corpus.keys() >= {*COUNTS}


def is_interrupted(corpus: Mapping[str, Any]) -> bool:
    """Whether a study was stopped before it had seen all of its texts; a part is incomplete without that."""
    return bool(corpus.get("interrupted", not corpus.get("complete", True)))


def failure_line(failure: Mapping[str, str]) -> str:
    """Such as "describing the heads failed: not enough memory".

    Args:
        failure: One of the `failures` of a record's run.
    """
    return f"{failure['step']} failed: {failure['error']}"


def settle_corpus(corpus: Mapping[str, Any], *, interrupted: bool = False) -> dict[str, Any]:
    """What a record says of its corpus: a part is incomplete, and says apart whether it was interrupted.

    Args:
        corpus: What it said so far.
        interrupted: Whether a further step was interrupted.
    """
    settled = {name: value for name, value in corpus.items() if name != "interrupted"}
    stopped = interrupted or is_interrupted(corpus)
    return settled | ({"complete": False, "interrupted": stopped} if shards_note(corpus) else {"complete": not stopped})
