"""The loop that everyone writes: eager attention, an Axes and labels for every head, savefig; text by text.

Prints the seconds that each text took, one a line.

usage: python plain_loop.py MODEL_FOLDER TEXTS_FILE OUT
"""

import sys
import time
from pathlib import Path

import matplotlib
import torch
from transformers import AutoModel, AutoTokenizer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

folder, texts, out = sys.argv[1], Path(sys.argv[2]).read_text("utf-8").splitlines(), Path(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

for number, text in enumerate(texts):
    started = time.perf_counter()
    home = out / f"{number:05d}"
    home.mkdir(parents=True, exist_ok=True)
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    for layer, attention in enumerate(attentions):
        figure, axes = plt.subplots(3, 4, figsize=(16, 12))
        for head, ax in enumerate(axes.flat):
            ax.imshow(attention[0, head].numpy(), vmin=0, vmax=1, cmap="Blues")
            ax.set_title(f"head {head}")
            ax.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8)
            ax.set_yticks(range(len(tokens)), tokens, fontsize=8)
        figure.suptitle(f"layer {layer}")
        figure.tight_layout()
        figure.savefig(home / f"layer_{layer}.png", dpi=100)
        plt.close(figure)
    figure, axes = plt.subplots(len(attentions), 12, figsize=(16, 12))
    for layer, attention in enumerate(attentions):
        for head in range(12):
            axes[layer, head].imshow(attention[0, head].numpy(), vmin=0, vmax=1, cmap="Blues")
            axes[layer, head].set_xticks([])
            axes[layer, head].set_yticks([])
    figure.savefig(home / "overview.png", dpi=100)
    plt.close(figure)
    print(time.perf_counter() - started, flush=True)
