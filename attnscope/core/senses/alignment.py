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
"""Width of the running median, in frames."""


def align_tokens(weights: NDArray[np.floating], width: int = MEDIAN_FRAMES) -> NDArray[np.int64]:
    """The frame at which the path comes to each token, (token,), never falling; the first is 0.

    Args:
        weights: (head, token, frame): attention weights, 0 to 1.
        width: Width of the running median in frames, odd; nothing is smoothed if there are at most half as many frames.

    Raises:
        ValueError: There is no head, token or frame, or the width is even.
    """
    if weights.ndim != 3 or 0 in weights.shape or width % 2 == 0:
        raise ValueError(f"weights {weights.shape} and a median over {width} frames align nothing")
    return align_levels(level_weights(weights, width))


def level_weights(weights: NDArray[np.floating], width: int = MEDIAN_FRAMES) -> NDArray[np.float64]:
    """Each head's weights, standardised over tokens and smoothed over frames.

    Args:
        weights: (head, token, frame): attention weights, 0 to 1, on the frames with sound. Each token's weights are
            divided by their sum, as if the model had seen no other frame.
        width: As of `align_tokens`.

    Returns:
        (head, token, frame), in standard deviations.
    """
    values = weights.astype(np.float64)
    total = values.sum(2, keepdims=True)
    np.divide(values, total, out=values, where=total > 0)
    spread = values.std(1, keepdims=True)
    # A frame that all tokens attend to alike says nothing of where they are.
    level: NDArray[np.float64] = np.divide(
        values - values.mean(1, keepdims=True), spread, out=np.zeros_like(values), where=spread > 0
    )
    half = width // 2
    if values.shape[2] > half:
        padded = np.pad(level, ((0, 0), (0, 0), (half, half)), mode="reflect")
        level = np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=2), axis=-1)
    return level


def align_levels(levels: NDArray[np.floating]) -> NDArray[np.int64]:
    """The same from the `level_weights` of each head, (head, token, frame): (token,), never falling, from 0."""
    return _warp(-levels.mean(0, dtype=np.float64))


def _warp(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Where the cheapest path from the first token and frame to the last of both enters each row of costs."""
    n_tokens, n_frames = costs.shape
    # Steps into a cell: 0 = from the token and the frame before, 1 = the token before, 2 = the frame before.
    steps = np.zeros((n_tokens, n_frames), np.int8)
    before = [0.0] + [np.inf] * n_frames
    for token in range(n_tokens):
        here, last = [np.inf] * (n_frames + 1), np.inf
        for frame, cost in enumerate(costs[token].tolist()):
            both, down, along = before[frame], before[frame + 1], last
            step = 0 if both < down and both < along else 1 if down < both and down < along else 2
            last = here[frame + 1] = cost + (both, down, along)[step]
            steps[token, frame] = step
        before = here
    frames = np.zeros(n_tokens, np.int64)
    token, frame = n_tokens - 1, n_frames - 1
    while token > 0 or frame > 0:
        frames[token] = frame
        step = 2 if token == 0 else 1 if frame == 0 else steps[token, frame]
        token, frame = token - (step != 2), frame - (step != 1)
    frames[0] = 0
    return frames
