"""Read many texts in constant memory: from files to texts, blocks of texts, chunks and batches.

What a head does is measured over a corpus that need not fit in memory, on one machine or on several. Where a corpus is
cut depends on the texts alone: a block is a run of consecutive texts, and its chunks are put into batches of a fixed
budget of tokens. So no result depends on how many workers share the blocks.

This package knows no model: callers pass the function that tokenises.
"""

from attnscope.corpus.batching import (
    BLOCK,
    MAX_BLOCK_CHARACTERS,
    TOKEN_BUDGET,
    Chunk,
    TextBlock,
    batch_block,
    chunks,
    count_tokens,
    cut_into_blocks,
    cut_into_runs,
    make_batches,
    tokens_of_ids,
)
from attnscope.corpus.copies import CopyFilter, copy_key, distinct, normalise_text
from attnscope.corpus.formats import Problem, Split
from attnscope.corpus.probes import (
    Needle,
    NeedleSource,
    generate_needles,
    generate_repeats,
    select_word_ids,
    start_range,
)
from attnscope.corpus.texts import Corpus, CorpusText, expand_patterns
