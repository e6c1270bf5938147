"""Shards of a corpus: which a record holds, which are missing, and whether their study was interrupted or failed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

_SHARD = re.compile(r"([1-9]\d{0,8})/([1-9]\d{0,8})")
_MOST_NAMED = 8
COUNTS = ("n_texts", "n_tokens", "n_chunked")
"""What of a corpus adds up over its shards."""


def shards_note(corpus: Mapping[str, Any]) -> str:
    """Such as "1 of 2 shards: 2/2 is missing"; empty where a record is of the whole corpus, or does not tell."""
    shards = corpus.get("shards")
    matches = [_SHARD.fullmatch(str(shard)) for shard in shards] if isinstance(shards, list | tuple) else []
    numbers = {int(match[1]) for match in matches if match}
    totals = {int(match[2]) for match in matches if match}
    if len(totals) != 1 or (n := totals.pop()) == len(numbers):
        return ""
    n_missing = n - len(numbers)
    missing = (f"{number}/{n}" for number in range(1, n + 1) if number not in numbers)
    named = [*itertools.islice(missing, _MOST_NAMED)]
    more = f" and {n_missing - len(named):,} more" if n_missing > len(named) else ""
    return f"{len(numbers)} of {n:,} shards: {', '.join(named)}{more} {'is' if n_missing == 1 else 'are'} missing"


def is_part(corpus: Mapping[str, Any]) -> bool:
    """Whether a record is of shards of a corpus, or of all of it, and can be added up with others."""
    shards = corpus.get("shards")
    is_named = isinstance(shards, list | tuple) and all(_SHARD.fullmatch(str(shard)) for shard in shards)
    return bool(shards) and is_named and corpus.keys() >= {*COUNTS}


def is_interrupted(corpus: Mapping[str, Any]) -> bool:
    """Whether a study was stopped before it had seen all of its texts; a part is incomplete without that."""
    return bool(corpus.get("interrupted", not corpus.get("complete", True)))


def failure_line(failure: Mapping[str, str]) -> str:
    """Such as "describing the heads failed: not enough memory", of one of the `failures` of a record's run."""
    return f"{failure['step']} failed: {failure['error']}"


def settle_corpus(corpus: Mapping[str, Any], *, interrupted: bool = False) -> dict[str, Any]:
    """What a record says of its corpus after a further step: a part is incomplete, and says if it was interrupted."""
    settled = {name: value for name, value in corpus.items() if name != "interrupted"}
    stopped = interrupted or is_interrupted(corpus)
    return settled | ({"complete": False, "interrupted": stopped} if shards_note(corpus) else {"complete": not stopped})
