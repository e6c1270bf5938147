"""Find when each token of a transcript is spoken, from the cross-attention of its tokens to the audio frames.

Each head's weights are normalised over the frames with sound, standardised over tokens in each frame, and smoothed by a
running median over frames. Dynamic time warping then finds the path through the mean over heads that has the largest
sum, among all paths that never go back to an earlier token or frame.

Source: Radford et al. 2023 (Whisper), `openai-whisper`, timing.py. There, the tokens of the prompt and the end token
are part of the standardisation too. Dynamic time warping: Sakoe & Chiba 1978.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from attnscope.arrays import Floats, Integers, divide

MEDIAN_FRAMES = 7
"""Width of the running median, in frames. A recording of 3 frames or fewer (half the width) is not smoothed."""


def align_tokens(weights: NDArray[np.floating]) -> Integers:
    """Return the first frame of each token on the best path, (token,), ascending; the first token has frame 0.

    `weights` are attention weights, (head, token, frame), 0 to 1.
    """
    # (token, frame)
    mean_levels = standardise_weights(weights).mean(0)
    # The path with the largest sum is the cheapest path if costs are the negative levels. There is one path.
    first_frames: Integers = find_cheapest_paths(-mean_levels[None])[0]
    return first_frames


def standardise_weights(weights: NDArray[np.floating]) -> Floats:
    """Return each head's weights, standardised over tokens and smoothed over frames.

    Args:
        weights: (head, token, frame): attention weights, 0 to 1, on the frames with sound. Each token's weights are
            divided by their sum, as if the model had attended to no other frame.

    Returns:
        (head, token, frame), in standard deviations.
    """
    # The weights of each token over the frames with sound sum to 1; (head, token, frame).
    normalised = weights.astype(np.float64)
    totals = normalised.sum(2, keepdims=True)
    np.divide(normalised, totals, out=normalised, where=totals > 0)
    # Standard deviations from the mean over tokens, in each frame. If all tokens attend to a frame alike, it does not
    # help to tell where they are: its values are 0.
    differences = normalised - normalised.mean(1, keepdims=True)
    deviations = normalised.std(1, keepdims=True)
    standardised = divide(differences, deviations, 0.0)
    # Take the running median over frames. Both ends are mirrored, which needs more than `half_width` frames.
    half_width = MEDIAN_FRAMES // 2
    if normalised.shape[2] > half_width:
        padded = np.pad(standardised, ((0, 0), (0, 0), (half_width, half_width)), mode="reflect")
        # (head, token, frame, frame in window) -> (head, token, frame)
        standardised = np.median(sliding_window_view(padded, MEDIAN_FRAMES, axis=2), axis=-1)
    return standardised


def find_cheapest_paths(costs: Floats) -> Integers:
    """Return the first frame of each token on the cheapest path through each map of costs (dynamic time warping).

    A path goes from the first token and frame to the last token and frame, by steps to the next token, the next frame,
    or both. All maps are handled together, one anti-diagonal of cells after the other: the cells of a diagonal do not
    depend on each other.

    Args:
        costs: The cost of each cell in each map, (path, token, frame): one path per map.

    Returns:
        (path, token), ascending along tokens; the first token has frame 0.
    """
    n_paths, n_tokens, n_frames = costs.shape
    n_diagonals = n_tokens + n_frames - 1

    # Diagonal d has the cells with token + frame = d, one for each token. Cells outside the map have infinite costs.
    tokens = np.arange(n_tokens)
    # (diagonal, token)
    frames = np.arange(n_diagonals)[:, None] - tokens
    is_inside = (frames >= 0) & (frames < n_frames)
    # (path, diagonal, token) -> (diagonal, path, token)
    cell_costs = costs[:, tokens, np.where(is_inside, frames, 0)].swapaxes(0, 1)
    cell_costs = np.where(is_inside[:, None], cell_costs, np.inf)

    # The cheapest step into each cell, (diagonal, path, token): 0 = from the previous token and frame, 1 = from the
    # previous token, 2 = from the previous frame.
    steps = np.full(cell_costs.shape, 2, np.int8)
    # The costs of the cheapest paths to the cells of the latest two diagonals, (path, 1 + token). Column 0 is a dummy
    # token before the first. Its cost is 0 only at the start, on the diagonal before the previous one: so every path
    # starts with a step of both into the first cell.
    previous_costs = np.full((n_paths, n_tokens + 1), np.inf)
    earlier_costs = previous_costs.copy()
    earlier_costs[:, 0] = 0.0
    for diagonal in range(n_diagonals):
        # The cost before each step, (path, token). Both indices change over two diagonals, one index over one.
        from_both = earlier_costs[:, :-1]
        from_token = previous_costs[:, :-1]
        from_frame = previous_costs[:, 1:]
        # As in Whisper, ties go to step 2: steps 0 and 1 must be cheaper than both others.
        diagonal_steps = steps[diagonal]
        diagonal_steps[(from_both < from_token) & (from_both < from_frame)] = 0
        diagonal_steps[(from_token < from_both) & (from_token < from_frame)] = 1
        step_costs = np.choose(diagonal_steps, (from_both, from_token, from_frame))
        path_costs = np.full_like(previous_costs, np.inf)
        path_costs[:, 1:] = cell_costs[diagonal] + step_costs
        earlier_costs = previous_costs
        previous_costs = path_costs

    # Follow all paths back from the last cell at once, each index (path,). A path that has reached the first cell stays
    # there. Frames of a token are visited from the last to the first, so that the first one is kept.
    first_frames = np.zeros((n_paths, n_tokens), np.int64)
    path = np.arange(n_paths)
    token = np.full(n_paths, n_tokens - 1)
    frame = np.full(n_paths, n_frames - 1)
    for _ in range(n_diagonals):
        first_frames[path, token] = frame
        step = steps[token + frame, path, token]
        # At the first frame only the token can go back, and at the first token only the frame.
        step[frame == 0] = 1
        step[token == 0] = 2
        token = np.maximum(token - (step != 2), 0)
        frame = np.maximum(frame - (step != 1), 0)
    return first_frames
