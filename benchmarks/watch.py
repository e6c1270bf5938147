"""What HeadWatch costs a training: seconds a step without it, and seconds a measurement, in CPU time of one process.

One measurement reads `--texts` texts, each as long as those of a training step; the model is one from a folder, or a
random Llama of 6 layers. The last line is JSON.

usage: python -m benchmarks.watch [--model FOLDER] [--texts 32] [--every 500]
"""

import argparse
import json
import time

import numpy as np
import torch
import transformers

from attnscope.corpus import CorpusText
from attnscope.studies.timeline.watch import HeadWatch

BATCH, LENGTH, STEPS = 4, 64, 4


def open_model(folder: str | None) -> transformers.PreTrainedModel:
    if folder:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 12}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=1000, num_key_value_heads=12, **sizes))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--every", type=int, default=500)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = open_model(given.model).train()
    chance, size = np.random.default_rng(0), model.config.vocab_size
    rows = chance.integers(4, size, (given.texts, LENGTH))
    texts = [CorpusText(n, "random", n + 1, ids=tuple(map(int, row))) for n, row in enumerate(rows)]
    watch, optimizer = HeadWatch(texts), torch.optim.AdamW(model.parameters(), 1e-5)

    def train_step() -> None:
        ids = torch.from_numpy(chance.integers(4, size, (BATCH, LENGTH)))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def seconds(work: object, times: int) -> float:
        began = time.process_time()
        for number in range(times):
            work(number)  # type: ignore[operator]
        return (time.process_time() - began) / times

    train_step()
    first = seconds(lambda _: watch.measure(model, 0), 1)
    step, measurement = seconds(lambda _: train_step(), STEPS), seconds(lambda n: watch.measure(model, n + 1), 2)
    print(
        json.dumps(
            {
                "benchmark": "watch",
                "model": given.model or "random Llama, 6 layers",
                "texts": given.texts,
                "tokens_a_text": LENGTH,
                "tokens_a_step": BATCH * LENGTH,
                "step_s": round(step, 3),
                "first_measurement_s": round(first, 3),
                "measurement_s": round(measurement, 3),
                "every": given.every,
                "share_of_training": round(measurement / (given.every * step), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
