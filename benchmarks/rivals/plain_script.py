"""The script that everyone writes: eager attention, an Axes and labels for every head, savefig.

usage: python plain_script.py MODEL_FOLDER TEXT OUT
"""

import sys
from pathlib import Path

import matplotlib
import torch
from transformers import AutoModel, AutoTokenizer

matplotlib.use("Agg")
import matplotlib.pyplot as plt

folder, text, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
out.mkdir(parents=True, exist_ok=True)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
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
    figure.savefig(out / f"layer_{layer}.png", dpi=100)
    plt.close(figure)

figure, axes = plt.subplots(len(attentions), 12, figsize=(16, 12))
for layer, attention in enumerate(attentions):
    for head in range(12):
        axes[layer, head].imshow(attention[0, head].numpy(), vmin=0, vmax=1, cmap="Blues")
        axes[layer, head].set_xticks([])
        axes[layer, head].set_yticks([])
figure.savefig(out / "overview.png", dpi=100)
