"""Questions: the columns of its result and the blocks of its report, one file per question. Loads no torch."""
