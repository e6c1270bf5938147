"""When each token of a transcript is spoken, from the frames that cross-attention listens to.

Each head's weights are normalised over the frames with sound, standardised over tokens, frame by frame, and smoothed by
a running median over time. Dynamic time warping then takes the path through the mean over heads that collects most
while neither token nor frame ever goes back.

Source: Radford et al. 2023 (Whisper), `openai-whisper`, timing.py, which standardises over the rows of the prompt and
of the end as well; dynamic time warping: Sakoe & Chiba 1978.
"""

import numpy as np
from numpy.typing import NDArray

MEDIAN_FRAMES = 7
"""Width of the running median, in frames; at most half as many frames are not smoothed."""


def align_tokens(weights: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the frame at which the path comes to each token, (token,), never falling; the first is 0.

    `weights` are attention weights, (head, token, frame), 0 to 1.
    """
    frames: NDArray[np.int64] = cheapest_paths(-level_weights(weights).mean(0)[None])[0]
    return frames


def level_weights(weights: NDArray[np.floating]) -> NDArray[np.float64]:
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
    # Standard deviations from the mean over tokens, frame by frame.
    spread = values.std(1, keepdims=True)
    # A frame that all tokens attend to alike says nothing of where they are.
    level: NDArray[np.float64] = np.divide(
        values - values.mean(1, keepdims=True), spread, out=np.zeros_like(values), where=spread > 0
    )
    # Running median over frames; both ends are mirrored.
    half = MEDIAN_FRAMES // 2
    if values.shape[2] > half:
        padded = np.pad(level, ((0, 0), (0, 0), (half, half)), mode="reflect")
        level = np.median(
            np.lib.stride_tricks.sliding_window_view(padded, MEDIAN_FRAMES, axis=2), axis=-1
        )
    return level


def cheapest_paths(costs: NDArray[np.float64]) -> NDArray[np.int64]:
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
    token = np.arange(n_tokens)

    # Cells by diagonal and token, (diagonal, path, token): of those beyond the map nothing is read.
    frame = np.arange(n_diagonals)[:, None] - token
    is_inside = (frame >= 0) & (frame < n_frames)
    skewed = costs[:, token, np.where(is_inside, frame, 0)].swapaxes(0, 1)

    # Steps into a cell: 0 = from the token and the frame before, 1 = the token before, 2 = the frame before.
    steps = np.zeros((n_diagonals, n_paths, n_tokens), np.int8)
    # One more at the front, before the first token.
    before_last = np.full((n_paths, n_tokens + 1), np.inf)
    last = before_last.copy()
    for diagonal in range(n_diagonals):
        both, down, along = before_last[:, :-1], last[:, :-1], last[:, 1:]
        step = np.where(
            (both < down) & (both < along), 0, np.where((down < both) & (down < along), 1, 2)
        )
        before = np.choose(step, (both, down, along)) if diagonal else np.zeros((n_paths, n_tokens))
        here = np.full((n_paths, n_tokens + 1), np.inf)
        here[:, 1:] = np.where(is_inside[diagonal], skewed[diagonal] + before, np.inf)
        steps[diagonal] = step
        before_last, last = last, here

    # Back from the last cell, all paths at once.
    frames = np.zeros((n_paths, n_tokens), np.int64)
    path = np.arange(n_paths)
    at_token = np.full(n_paths, n_tokens - 1)
    at_frame = np.full(n_paths, n_frames - 1)
    for _ in range(n_diagonals):
        frames[path, at_token] = at_frame
        step = steps[at_token + at_frame, path, at_token]
        step = np.where(at_token == 0, 2, np.where(at_frame == 0, 1, step))
        is_first = (at_token == 0) & (at_frame == 0)
        at_token = at_token - (~is_first & (step != 2))
        at_frame = at_frame - (~is_first & (step != 1))
    frames[:, 0] = 0
    return frames
