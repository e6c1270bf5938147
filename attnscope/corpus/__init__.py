"""Read many texts in constant memory: from files to texts, blocks of texts, chunks and batches.

What a head does is measured over a corpus that need not fit in memory, on one machine or on several. Every cut
here depends on the texts alone: blocks are fixed runs of consecutive texts, and a fixed budget makes batches inside a
block. So a number never depends on how the work was split.

It knows no model: callers pass the function that tokenises.
"""

from attnscope.corpus.batching import (
    BLOCK,
    BLOCK_CHARACTERS,
    TOKEN_BUDGET,
    Block,
    Chunk,
    Encode,
    batches,
    block_batches,
    blocks,
    chunks,
    count_tokens,
    runs,
    tokens_of_ids,
)
from attnscope.corpus.copies import Copies, copy_key, distinct, fold
from attnscope.corpus.formats import BAD_LINES, Format, Problem, Split
from attnscope.corpus.probes import (
    DEPTH_TOKENS,
    Hay,
    Needle,
    depth_range,
    needle_probe,
    repeat_probe,
    word_ids,
)
from attnscope.corpus.texts import Corpus, CorpusText, expand
