"""Real weights, and the little that is known of their heads: published, or measured without attnscope.

- MiniLM (all-MiniLM-L6-v2, pinned by attnscope): L0H2 gives the previous token 0.9999 of its mass and L1H8 looks at the
  next one. Measured with transformers' own eager attention; the fact stands in docs/design.md.
- SmolLM2-135M: heads with most of their mass on the previous token, as the loop below finds them in eager attention.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.known.truth import KnownModel, Place, Text, Truth, offset

ROOT = Path(__file__).resolve().parents[2]
N_TEXTS, N_HELD_OUT, MAX_WORDS = 40, 12, 60
LEAST = 0.6
PUBLISHED: dict[str, dict[Place, int]] = {"minilm": {(0, 2): -1, (1, 8): 1}}


def known_model(name: str) -> KnownModel:
    """MiniLM, or SmolLM2 from a folder, with what is known of their heads."""
    import attnscope

    model = attnscope.load(name)
    corpus = attnscope.Corpus([ROOT / "sample_texts" / "alice.txt"], split="paragraph")
    texts = [_text(model, " ".join((text.text or "").split()[:MAX_WORDS])) for text in corpus]
    texts = [text for text in texts if text.n > 12][: N_TEXTS + N_HELD_OUT]
    causal = model.info.kinds[0] == "decoder"
    known = PUBLISHED.get(name) or _previous_token_heads(name, [text.written for text in texts[:8]])
    source = "all-MiniLM-L6-v2" if name == "minilm" else Path(name).name
    heads = {place: Truth((offset(by),), True, "real", source) for place, by in known.items()}
    return KnownModel(f"real {source}", model, causal, texts[N_HELD_OUT:], texts[:N_HELD_OUT], heads)


def _text(model: Any, text: str) -> Text:
    tokens = model.tokenizer.encode(text)
    return Text(tuple(tokens.labels), int(tokens.special[-1]), text)


def _previous_token_heads(folder: str, texts: list[str]) -> dict[Place, int]:
    """Heads of which eager attention gives the previous token LEAST of its mass, in transformers alone."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shares = []
    for text in texts:
        with torch.no_grad():
            maps = model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
        shares.append(np.stack([layer[0].diagonal(-1, 1, 2).mean(-1).numpy() for layer in maps]))
    mean = np.mean(shares, 0)
    return {(int(layer), int(head)): -1 for layer, head in np.argwhere(mean >= LEAST)}
