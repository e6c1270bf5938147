"""The compiled half of `triton_pass`: two kernels that hold no more of the map than a tile in registers. Ours.

The walk over keys is that of FlashAttention (Dao et al. 2022, algorithm 1): sums of a row count from the largest score
seen so far, and are scaled down where a larger one comes. Every sum of a row goes along with it, in float32. What a
key receives is a sum over queries; a second kernel walks over these, with the rows' denominators known.

Keys and queries count from the block's first ones; `before` says where the first query stands among the keys. No
program adds to what another one wrote, so that numbers are the same each time. Exponentials are 0 from e^-87 on, as
in `numba_kernel`; tanh is that of Cephes (Moshier 1989), as triton's own is of one maker's devices.
"""

# ruff: noqa: N803 - triton's constants are written in capitals

import triton
import triton.language as tl


@triton.jit
def _exp(x):
    """E to the power of x up to 0; 0 below -87, where NaN stays NaN."""
    low = tl.where(x < -87.0, -87.0, x)
    return tl.where(low <= -87.0, 0.0, tl.exp(low))


@triton.jit
def _below(x, largest):
    """How far x is below the largest; a number too where it is infinitely far."""
    away = x - largest
    return tl.where(away < -87.0, -87.0, away)


@triton.jit
def _tanh(x):
    square = x * x
    p = -5.70498872745e-3 * square + 2.06390887954e-2
    p = p * square - 5.37397155531e-2
    p = p * square + 1.33314422036e-1
    p = p * square - 3.33332819422e-1
    large = tl.abs(x)
    rest = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(large, 44.0)) + 1.0)
    return tl.where(large < 0.625, p * square * x + x, tl.where(x < 0, -rest, rest))


@triton.jit
def _load_queries(call, strides, sizes, text, head, q, D: tl.constexpr):
    """A tile of queries, (query, d); those of float32 are scaled at once, as the other back ends have it."""
    d = tl.arange(0, D)
    at = call.query + text * strides.query[0] + head * strides.query[1]
    there = (q[:, None] < sizes.queries) & (d[None, :] < sizes.d_head)
    queries = tl.load(at + q.to(tl.int64)[:, None] * strides.query[2] + d[None, :], mask=there, other=0.0)
    if call.query.dtype.element_ty == tl.float32:
        queries = queries * call.scale
    return queries


@triton.jit
def _score(call, strides, sizes, queries, text, head, q, k, IS_CAUSAL: tl.constexpr):
    """Scores of a tile, (query, key), -inf where a query may not attend to a key."""
    d = tl.arange(0, queries.shape[1])
    at = call.key + text * strides.key[0] + head // sizes.group * strides.key[1]
    there = (k[None, :] < sizes.keys) & (d[:, None] < sizes.d_head)
    keys = tl.load(at + k.to(tl.int64)[None, :] * strides.key[2] + d[:, None], mask=there, other=0.0)
    scores = tl.dot(queries, keys, input_precision="ieee")
    if call.query.dtype.element_ty != tl.float32:
        scores = scores * call.scale
    if call.softcap is not None:
        scores = call.softcap * _tanh(scores / call.softcap)
    rows, columns = q.to(tl.int64)[:, None], k.to(tl.int64)[None, :]
    allowed = (q[:, None] < sizes.queries) & (k[None, :] < sizes.keys)
    inside = allowed
    if call.bias is not None:
        at = call.bias + text * strides.bias[0] + head * strides.bias[1]
        bias = tl.load(at + rows * strides.bias[2] + columns * strides.bias[3], mask=inside, other=0.0)
        scores += bias.to(tl.float32)
    ahead = k[None, :] - q[:, None] - sizes.before
    if IS_CAUSAL:
        allowed = allowed & (ahead <= 0)
    if call.window is not None:
        allowed = allowed & (ahead < call.window) & (ahead > -call.window)
    if call.mask is not None:
        at = call.mask + text * strides.mask[0] + head * strides.mask[1]
        may = tl.load(at + rows * strides.mask[2] + columns * strides.mask[3], mask=inside, other=0)
        allowed = allowed & (may != 0)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def read_rows(
    call, strides, sizes, facts, out, IS_CAUSAL: tl.constexpr, OWN_TEXT: tl.constexpr, REACH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The output of some queries of one head, and what is read off their rows; `out` is written to.

    `call`, `strides`, `sizes`, `facts` and `out` are the records of `triton_pass`. REACH: how far offsets reach. M, N:
    queries and keys of a tile. D, V: powers of 2, at least the widths of queries and of values.
    """
    head, text = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n_heads = tl.num_programs(0)
    first = tl.program_id(1) * M
    q = first + tl.arange(0, M)
    wide = tl.arange(0, V)
    queries = _load_queries(call, strides, sizes, text, head, q, D)
    row = (text * n_heads + head) * sizes.queries + q
    in_rows = q < sizes.queries
    place = q + sizes.before
    last = tl.minimum(first + M, sizes.queries) - 1 + sizes.before
    start, stop = 0, sizes.keys
    if IS_CAUSAL:
        stop = tl.minimum(stop, last + 1)
    if call.window is not None:
        start = tl.maximum(first + sizes.before - call.window + 1, 0) // N * N
        stop = tl.minimum(stop, last + call.window)
    final = tl.load(facts.final + text)
    largest = tl.full([M], float("-inf"), tl.float32)
    but_end = tl.full([M], float("-inf"), tl.float32)
    nothing = tl.zeros([M], tl.float32)
    total, total_off, times, times_off, ties, rare = nothing, nothing, nothing, nothing, nothing, nothing
    squares, near, near_off, ahead, ahead_off = nothing, nothing, nothing, nothing, nothing
    alike, alike_off, same, same_off, induced, induced_off = nothing, nothing, nothing, nothing, nothing, nothing
    output = tl.zeros([M, V], tl.float32)
    for at in range(start, stop, N):
        k = at + tl.arange(0, N)
        in_keys = k < sizes.keys
        of_key = text * sizes.keys + k
        scores = _score(call, strides, sizes, queries, text, head, q, k, IS_CAUSAL)
        off_rest = tl.load(facts.off_rest + of_key, mask=in_keys, other=0.0)[None, :]
        found = tl.max(scores, 1)
        # A largest score of -inf: nothing is there yet, and nothing may be taken from nothing.
        above = tl.where(found > largest, found, largest)
        base = tl.where(above == float("-inf"), 0.0, above)
        below = _below(largest, base)
        keep = _exp(below)
        but_end = tl.maximum(but_end, tl.max(tl.where(k[None, :] == final, float("-inf"), scores), 1))
        is_largest = (scores == base[:, None]).to(tl.float32)
        rarest = tl.load(facts.rare + of_key, mask=in_keys, other=0.0)[None, :]
        ties = tl.where(found > largest, 0.0, ties) + tl.sum(is_largest, 1)
        rare = tl.where(found > largest, 0.0, rare) + tl.sum(is_largest * rarest, 1)
        low = _below(scores, base[:, None])
        p = _exp(low)
        p_off = p * off_rest
        times = keep * (times + total * below) + tl.sum(p * low, 1)
        times_off = keep * (times_off + total_off * below) + tl.sum(p_off * low, 1)
        total = keep * total + tl.sum(p, 1)
        total_off = keep * total_off + tl.sum(p_off, 1)
        in_values = in_keys[:, None] & (wide[None, :] < sizes.d_value)
        of_values = call.value + text * strides.value[0] + head // sizes.group * strides.value[1]
        of_values += k.to(tl.int64)[:, None] * strides.value[2] + wide[None, :]
        values = tl.load(of_values, mask=in_values, other=0.0)
        output = output * keep[:, None]
        output += tl.dot(p.to(values.dtype), values, input_precision="ieee")
        if OWN_TEXT:
            away = k[None, :] - place[:, None]
            by = away.to(tl.float32)
            moved, moved_off = p * by, p_off * by
            squares = keep * squares + tl.sum(moved * by, 1)
            near = keep * near + tl.sum(tl.abs(moved), 1)
            near_off = keep * near_off + tl.sum(tl.abs(moved_off), 1)
            ahead = keep * ahead + tl.sum(moved, 1)
            ahead_off = keep * ahead_off + tl.sum(moved_off, 1)
            if facts.cosine is not None:
                of_pair = (text * sizes.queries + q)[:, None] * sizes.keys + k[None, :]
                cosine = tl.load(facts.cosine + of_pair, mask=in_rows[:, None] & in_keys[None, :], other=0.0)
                alike = keep * alike + tl.sum(p * cosine, 1)
                alike_off = keep * alike_off + tl.sum(p_off * cosine, 1)
            token = tl.load(facts.of_query + text * sizes.queries + q, mask=in_rows, other=-1)[:, None]
            other = tl.load(facts.of_key + of_key, mask=in_keys, other=-2)[None, :]
            previous = tl.load(facts.before_key + of_key, mask=in_keys, other=-2)[None, :]
            is_same = ((token == other) & (away != 0)).to(tl.float32)
            is_next = ((token == previous) & (away < 0)).to(tl.float32)
            same = keep * same + tl.sum(p * is_same, 1)
            same_off = keep * same_off + tl.sum(p_off * is_same, 1)
            induced = keep * induced + tl.sum(p * is_next, 1)
            induced_off = keep * induced_off + tl.sum(p_off * is_next, 1)
            if (at <= last + REACH) & (at + N > first + sizes.before - REACH):
                in_band = (away >= -REACH) & (away <= REACH) & in_rows[:, None] & in_keys[None, :]
                tl.store(out.band + row[:, None] * (2 * REACH + 1) + away + REACH, scores, mask=in_band)
        largest = above
    base = tl.where(largest == float("-inf"), 0.0, largest)
    whole = total
    if call.sinks is not None:
        sink = tl.load(call.sinks + head).to(tl.float32)
        whole += tl.exp(tl.minimum(sink - base, 80.0))
    empty = total == 0.0
    whole = tl.where(empty, 1.0, whole)
    scale = tl.where(empty, 0.0, 1.0 / whole)  # of NaN, NaN
    some = tl.where(total_off == 0.0, 1.0, total_off)
    shared = 1.0 / tl.maximum(ties, 1.0)
    tl.store(out.largest + row, base, mask=in_rows)
    tl.store(out.scale + row, scale, mask=in_rows)
    tl.store(out.shared + row, shared, mask=in_rows)
    of_output = out.output + text * strides.output[0] + head * strides.output[1]
    of_output += q.to(tl.int64)[:, None] * strides.output[2] + wide[None, :]
    output = output * scale[:, None]
    tl.store(of_output, output.to(out.output.dtype.element_ty), mask=in_rows[:, None] & (wide[None, :] < sizes.d_value))
    rows = out.rows + (text * n_heads + head) * 17 * sizes.queries + q
    seen = total * scale
    entropy = tl.log(whole) * seen - times * scale
    tl.store(rows, entropy, mask=in_rows)
    tl.store(rows + sizes.queries, tl.where(total_off == 0.0, 0.0, tl.log(some) - times_off / some), mask=in_rows)
    tl.store(rows + 2 * sizes.queries, _exp(but_end - base) * scale, mask=in_rows)
    tl.store(rows + 3 * sizes.queries, rare * shared, mask=in_rows)
    tl.store(rows + 4 * sizes.queries, seen, mask=in_rows)
    tl.store(rows + 5 * sizes.queries, total_off * scale, mask=in_rows)
    if OWN_TEXT:
        tl.store(rows + 6 * sizes.queries, tl.sqrt(squares * scale), mask=in_rows)
        tl.store(rows + 7 * sizes.queries, near * scale, mask=in_rows)
        tl.store(rows + 8 * sizes.queries, near_off * scale, mask=in_rows)
        tl.store(rows + 9 * sizes.queries, ahead * scale, mask=in_rows)
        tl.store(rows + 10 * sizes.queries, ahead_off * scale, mask=in_rows)
        tl.store(rows + 11 * sizes.queries, alike * scale, mask=in_rows)
        tl.store(rows + 12 * sizes.queries, alike_off * scale, mask=in_rows)
        tl.store(rows + 13 * sizes.queries, same * scale, mask=in_rows)
        tl.store(rows + 14 * sizes.queries, same_off * scale, mask=in_rows)
        tl.store(rows + 15 * sizes.queries, induced * scale, mask=in_rows)
        tl.store(rows + 16 * sizes.queries, induced_off * scale, mask=in_rows)


@triton.jit
def receive(
    call, strides, sizes, real, out, received, IS_CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """What some keys receive from one head's queries that are tokens, (text, head, key), written to `received`.

    `real` is 1 for queries that are tokens, (text, query), float32; `out` is what `read_rows` wrote; the rest is as
    there.
    """
    head, text = tl.program_id(0), tl.program_id(2).to(tl.int64)
    n_heads = tl.num_programs(0)
    first = tl.program_id(1) * N
    k = first + tl.arange(0, N)
    start, stop = 0, sizes.queries
    if IS_CAUSAL:
        start = tl.maximum(first - sizes.before, 0) // M * M
    if call.window is not None:
        start = tl.maximum(start, tl.maximum(first - call.window + 1 - sizes.before, 0) // M * M)
        stop = tl.minimum(stop, tl.maximum(first + N - 1 + call.window - sizes.before, 0))
    # Of one tile of queries float32 will do; of all of them, it is the precision of sums.
    mass = tl.zeros([N], received.dtype.element_ty)
    for at in range(start, stop, M):
        q = at + tl.arange(0, M)
        in_rows = q < sizes.queries
        row = (text * n_heads + head) * sizes.queries + q
        queries = _load_queries(call, strides, sizes, text, head, q, D)
        scores = _score(call, strides, sizes, queries, text, head, q, k, IS_CAUSAL)
        largest = tl.load(out.largest + row, mask=in_rows, other=0.0)
        scale = tl.load(out.scale + row, mask=in_rows, other=0.0)
        counts = tl.load(real + text * sizes.queries + q, mask=in_rows, other=0.0)
        weights = _exp(_below(scores, largest[:, None])) * scale[:, None]
        mass += tl.sum(weights * counts[:, None], 0).to(mass.dtype)
    tl.store(received + (text * n_heads + head) * sizes.keys + k, mass, mask=k < sizes.keys)
