"""Random tokens that come twice: the standard test for induction heads."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike

from attnscope.corpus.texts import CorpusText
from attnscope.errors import AttnscopeError


def repeat_probe(
    vocab_ids: ArrayLike,
    n_texts: int,
    length: int,
    seed: int,
    *,
    before: Sequence[int] = (),
    after: Sequence[int] = (),
) -> Iterator[CorpusText]:
    """Random token sequences that come twice, x1 … xm x1 … xm: the standard test for induction heads.

    Nothing but induction helps a model in the second half (Olsson et al. 2022, In-context Learning and Induction
    Heads). m is drawn anew for each text, from half of `length`, rounded up, to `length`: if it were the same, a head
    that looks back by a fixed number of tokens would pass as induction. Tokens are drawn uniformly, with replacement.
    Text number i depends on the seed, i and the set of `vocab_ids` alone: the first texts of a longer probe are those
    of a shorter one.

    Args:
        vocab_ids: The token numbers to draw from, in any order: ordinary tokens, no special ones.
        n_texts: How many texts.
        length: The most tokens of one half.
        seed: At least 0.
        before: Token numbers to begin each text with, such as [CLS].
        after: Token numbers to end each text with.

    Raises:
        AttnscopeError: There is nothing to draw from, or a number is too small.
    """
    vocabulary = np.unique(np.asarray(vocab_ids, np.int64))
    if not len(vocabulary) or n_texts < 1 or length < 1 or seed < 0:
        raise AttnscopeError(
            f"no probe of {n_texts} texts of {length} tokens from {len(vocabulary)} with seed {seed}",
            "texts, tokens and vocabulary are at least 1, the seed at least 0",
        )

    def texts() -> Iterator[CorpusText]:
        for index in range(n_texts):
            # Raw numbers of PCG64: NumPy promises that they stay the same, which it does not of Generator's methods.
            # The remainder prefers no token by more than 1 in 2^64 / len(vocabulary).
            *raw, last = np.random.PCG64(np.random.SeedSequence([seed, index])).random_raw(length + 1)
            drawn = np.array(raw) % np.uint64(len(vocabulary))
            half = vocabulary[drawn[: length - int(last) % (length // 2 + 1)].astype(np.int64)].tolist()
            yield CorpusText(index, f"repeat probe, seed {seed}", index + 1, ids=(*before, *half, *half, *after))

    return texts()
