"""Distances between all pairs of heads: by one matrix product, by blocks, and by the loop that everyone writes.

    python -m benchmarks.compare

72 heads on 20 texts of 100 tokens; the forward is left out. The loop calls scipy's jensenshannon on the rows of each
pair of heads, as it is written for notebooks; it runs on some texts and counts for all. The last line is JSON.
"""

import argparse
import json
import math
import time

import numpy as np
import torch
from scipy.spatial.distance import jensenshannon

from attnscope.core.distance import sum_divergences


def weights_of(n_texts: int, n_tokens: int) -> list[torch.Tensor]:
    """Return the weights of minilm on texts of exactly so many tokens, (head, query, key) each."""
    from attnscope import heatmap, load

    model = load("minilm")
    sentence = "the animal did not cross the street because it was too tired and the road too wide for so small a cat"
    words = sentence.split(" ")
    generator = np.random.default_rng(0)
    found = []
    for _ in range(n_texts):
        text = " ".join(generator.choice(words, n_tokens - 2))
        weights = heatmap(model, text).weights
        assert weights.shape[2:] == (n_tokens, n_tokens)
        found.append(torch.from_numpy(weights.reshape(-1, n_tokens, n_tokens)))
    return found


def loop(weights: np.ndarray) -> np.ndarray:
    """Return the Jensen-Shannon divergence of each pair of heads, summed over tokens (Clark et al. 2019, section 6)."""
    n = len(weights)
    sums = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1, n):
            sums[i, j] = sums[j, i] = (jensenshannon(weights[i], weights[j], axis=-1) ** 2).sum()
    return sums


def hellinger_by_definition(weights: np.ndarray) -> np.ndarray:
    """Root mean square Hellinger distances, pair by pair, in float64."""
    roots = np.sqrt(weights)
    n = len(weights)
    found = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            found[i, j] = math.sqrt((((roots[i] - roots[j]) ** 2).sum(-1) / 2).mean())
    return found


def timed(function, *given):
    start = time.perf_counter()
    result = function(*given)
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--loop-texts", type=int, default=3, help="texts that the loop runs on")
    given = parser.parse_args()
    texts = weights_of(given.texts, given.tokens)
    sum_divergences("hellinger", texts[0])
    sum_divergences("jensen_shannon", texts[0])
    hellinger_s = min(
        timed(lambda: [sum_divergences("hellinger", text) for text in texts])[0] for _ in range(3)
    )
    jensen_shannon_s, exact = timed(
        lambda: [sum_divergences("jensen_shannon", text).sums.numpy() for text in texts]
    )
    rows = [text.double().numpy() for text in texts]
    loop_s, looped = timed(lambda: [loop(row) for row in rows[: given.loop_texts]])
    loop_s *= given.texts / given.loop_texts
    worst_js = max(np.abs(a - b).max() / given.tokens for a, b in zip(exact, looped, strict=False))
    fast = np.sqrt((sum_divergences("hellinger", texts[0]).sums / given.tokens).numpy())
    result = {
        "benchmark": "compare",
        "goal": "hellinger_times_faster >= 20, hellinger_error <= 1e-5, jensen_shannon_error <= 1e-6",
        "heads": len(texts[0]),
        "texts": given.texts,
        "tokens": given.tokens,
        "threads": torch.get_num_threads(),
        "hellinger_s": round(hellinger_s, 4),
        "jensen_shannon_s": round(jensen_shannon_s, 3),
        "loop_s": round(loop_s, 1),
        "hellinger_times_faster": round(loop_s / hellinger_s),
        "jensen_shannon_times_faster": round(loop_s / jensen_shannon_s, 1),
        "hellinger_error": float(np.abs(fast - hellinger_by_definition(rows[0])).max()),
        "jensen_shannon_error": float(worst_js),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
