"""What one pass over the weights adds up of each head, by family, in columns. Ours.

A measure is read off these columns by its family alone; no measure is named here.
"""

from functools import cache

from torch import Tensor

from attnscope.core.measures.catalogue import MEASURES, OFFSETS, PAIR_FACTS, REACH, STATISTICS, Pairs, Places, Row

_WIDTHS: dict[str, int] = (
    dict.fromkeys(STATISTICS, 1)
    | dict.fromkeys(PAIR_FACTS, 1)
    | {f"{fact} off rest": 1 for fact in PAIR_FACTS}
    | {"uniform cosine": 1, "uniform cosine off rest": 1}
    | {"hits": len(OFFSETS), "places": len(OFFSETS), "places off rest": len(OFFSETS)}
)


def _slots(widths: dict[str, int]) -> dict[str, slice]:
    """The place of each part if one stands after the other."""
    slots, start = {}, 0
    for name, width in widths.items():
        slots[name] = slice(start, start := start + width)
    return slots


BOARD = _slots(_WIDTHS)
"""Name -> its columns, sums over the queries that count: statistics of rows, functions of query and key, the cosine
under uniform attention of the same mass, how often the largest weight is at each offset, and the weight at each offset.
"off rest": of the keys outside the sinks alone."""

N_COLUMNS = sum(_WIDTHS.values())

_QUERY_WIDTHS = {
    "counted": 1, "relative_entropy": 1, "max_weight": 1, "rarest": 1, "uniform cosine": 1,
    "uniform cosine off rest": 1, "places": len(OFFSETS), "places off rest": len(OFFSETS),
}  # fmt: skip

QUERY = _slots(_QUERY_WIDTHS)
"""Name -> the columns of what is known of each query: whether it counts; its factor in statistics (divided by the
logarithm of its number of keys, or by the number of rarest tokens); the cosine under uniform attention; and its
offsets."""

N_QUERY_COLUMNS = sum(_QUERY_WIDTHS.values())


def read_board(board: Tensor, *, own_text: bool, knows: set[str]) -> tuple[list[str], Tensor]:
    """The sums of measures that are read off a board, by measure and `<measure>_active`.

    Args:
        board: (unit, head, N_COLUMNS).
        own_text: Whether queries and keys are of one text.
        knows: The facts and statistics that are known.

    Returns:
        Names, and their sums, (measure, unit, head).
    """
    columns, less = _columns(own_text, frozenset(knows))
    # All at once: one by one they would take as long as a small tile.
    sums = board[..., [of[0] for of in columns.values()]]
    for i, (name, of) in enumerate(columns.items()):
        if len(of) > 1:
            sums[..., i] = board[..., of].sum(-1)
        if name in less:
            sums[..., i] -= board[..., less[name]]
    return list(columns), sums.permute(2, 0, 1)


@cache
def _columns(own_text: bool, knows: frozenset[str]) -> tuple[dict[str, list[int]], dict[str, int]]:
    """The columns that each measure adds up; and the column that is subtracted, if there is one."""
    columns: dict[str, list[int]] = {}
    less: dict[str, int] = {}
    endings = (("", ""), ("_active", " off rest"))
    for name, measure in MEASURES.items():
        match measure.family:
            case Row(statistic) if statistic in knows:
                columns[name] = [BOARD[statistic].start]
            case Pairs(fact) if fact in knows and own_text:
                for ending, of in endings:
                    columns[name + ending] = [BOARD[fact + of].start]
                    if measure.family.beyond_uniform:
                        less[name + ending] = BOARD[f"uniform {fact}{of}"].start
            case Places(offsets) if own_text:
                for ending, of in endings:
                    here = BOARD["places" + of].start + REACH
                    columns[name + ending] = [here + offset for offset in offsets]
    return columns, less
