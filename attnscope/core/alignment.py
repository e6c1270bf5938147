"""When each token of a transcript is spoken, from the frames that cross-attention listens to.

Each head's weights are normalised over the frames with sound, standardised over tokens, frame by frame, and smoothed by
a running median over time. Dynamic time warping then takes the path through the mean over heads that collects most
while neither token nor frame ever goes back.

Source: Radford et al. 2023 (Whisper), `openai-whisper`, timing.py, which standardises over the rows of the prompt and
of the end as well; dynamic time warping: Sakoe & Chiba 1978.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

MEDIAN_FRAMES = 7
"""Width of the running median, in frames; recordings of half as many frames or fewer are not smoothed."""


def align_tokens(weights: NDArray[np.floating]) -> Integers:
    """Return the frame at which the path comes to each token, (token,), never falling; the first is 0.

    `weights` are attention weights, (head, token, frame), 0 to 1.
    """
    mean = standardise(weights).mean(0)
    frames: Integers = cheapest_paths(-mean[None])[0]
    return frames


def standardise(weights: NDArray[np.floating]) -> Floats:
    """Return each head's weights, standardised over tokens and smoothed over frames.

    Args:
        weights: (head, token, frame): attention weights, 0 to 1, on the frames with sound. Each token's weights are
            divided by their sum, as if the model had seen no other frame.

    Returns:
        (head, token, frame), in standard deviations.
    """
    # Weights over the frames with sound: each token's sum to 1.
    values = weights.astype(np.float64)
    total = values.sum(2, keepdims=True)
    np.divide(values, total, out=values, where=total > 0)
    # Standard deviations from the mean over tokens, frame by frame. A frame that all tokens attend to alike says
    # nothing of where they are: it is 0.
    distances = values - values.mean(1, keepdims=True)
    deviation = values.std(1, keepdims=True)
    standardised = np.zeros_like(values)
    np.divide(distances, deviation, out=standardised, where=deviation > 0)
    # Running median over frames; both ends are mirrored.
    half = MEDIAN_FRAMES // 2
    if values.shape[2] > half:
        padded = np.pad(standardised, ((0, 0), (0, 0), (half, half)), mode="reflect")
        standardised = np.median(sliding_window_view(padded, MEDIAN_FRAMES, axis=2), axis=-1)
    return standardised


def cheapest_paths(costs: Floats) -> Integers:
    """Return the frame at which the cheapest path through each map of costs comes to each token.

    A path goes from the first token and frame to the last of both, and never back. The maps are gone through together,
    one diagonal of cells after the other: those of a diagonal do not depend on each other.

    Args:
        costs: (path, token, frame).

    Returns:
        (path, token), never falling; the first is 0.
    """
    n_paths, n_tokens, n_frames = costs.shape
    n_diagonals = n_tokens + n_frames - 1

    # On diagonal d lie the cells with token + frame = d. Cells beyond the map cost infinitely much.
    tokens = np.arange(n_tokens)
    # (diagonal, token)
    frames = np.arange(n_diagonals)[:, None] - tokens
    is_inside = (frames >= 0) & (frames < n_frames)
    # (path, diagonal, token) -> (diagonal, path, token)
    cell_costs = costs[:, tokens, np.where(is_inside, frames, 0)].swapaxes(0, 1)
    cell_costs = np.where(is_inside[:, None], cell_costs, np.inf)

    # Steps into a cell: 0 = from the token and the frame before, 1 = the token before, 2 = the frame before.
    steps = np.full(cell_costs.shape, 2, np.int8)
    # Costs of the cheapest paths to the cells of the last two diagonals, (path, 1 + token). Column 0 stands for a token
    # before the first. It costs nothing two diagonals before the first cell alone, so every path starts there.
    last = np.full((n_paths, n_tokens + 1), np.inf)
    before_last = last.copy()
    before_last[:, 0] = 0.0
    for diagonal in range(n_diagonals):
        from_both = before_last[:, :-1]
        from_token = last[:, :-1]
        from_frame = last[:, 1:]
        # As in Whisper, a step is 2 unless one of the others is cheaper than both.
        step = steps[diagonal]
        step[(from_both < from_token) & (from_both < from_frame)] = 0
        step[(from_token < from_both) & (from_token < from_frame)] = 1
        path_costs = np.full_like(last, np.inf)
        path_costs[:, 1:] = cell_costs[diagonal] + np.choose(step, (from_both, from_token, from_frame))
        before_last = last
        last = path_costs

    # Back from the last cell, all paths at once; those that have come to the first cell stay there. The first frame of
    # a token is reached last, and overwrites the later ones.
    arrivals = np.zeros((n_paths, n_tokens), np.int64)
    path = np.arange(n_paths)
    token = np.full(n_paths, n_tokens - 1)
    frame = np.full(n_paths, n_frames - 1)
    for _ in range(n_diagonals):
        arrivals[path, token] = frame
        step = steps[token + frame, path, token]
        step[frame == 0] = 1
        step[token == 0] = 2
        token = np.maximum(token - (step != 2), 0)
        frame = np.maximum(frame - (step != 1), 0)
    return arrivals
