"""Draw texts as descriptions do, with the rows of their queries, for benchmarks that fit and score by themselves."""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from attnscope.corpus import BLOCK, CopyFilter, count_tokens, distinct
from attnscope.models.model import Model
from attnscope.studies.describe.rows import SampledText, TextSampler
from attnscope.studies.heads.measuring import HeadMeasurer, HeadSums
from attnscope.studies.heads.options import DescribeOptions
from attnscope.studies.inputs.texts import Texts, special_ids
from attnscope.studies.run import run


def read_sample(
    model: Model, texts: Texts, options: DescribeOptions
) -> tuple[list[SampledText], NDArray[np.int64]]:
    """Return the texts that are drawn, with the rows of their queries; and how often tokens occur."""
    drawing = TextSampler(options.seed)
    special = special_ids(model)
    counts = count_tokens(drawing.watch(distinct(texts, CopyFilter())), model.tokenizer.encode, special)
    units = drawing.sample(model, options)
    sampled = {(unit.chunk.text_index, unit.chunk.number): unit.queries for unit in units}
    make = partial(HeadMeasurer, counts=counts, special=special, sampled=sampled)
    rows = run(make, (model,), texts, HeadSums(), block_size=BLOCK).done.rows
    for unit in units:
        unit.rows = rows[unit.chunk.text_index, unit.chunk.number]
    return units, counts
