"""Patching on pairs: what it costs beside the half forwards that it needs, TransformerLens in the same run, figures.

    python -m benchmarks.patching --speed MODEL [--pairs 100] [--tokens 20] [--layers-step 1]
    python -m benchmarks.patching --rival [MODEL]          # needs transformer_lens 4.3: its own hooks, in the same run
    python -m benchmarks.patching --figures MODEL sample_texts/pairs/agreement.jsonl

Times are of the processor, of one thread, so that other work on the machine does not count. The last line is JSON.
"""

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

import attnscope
from attnscope.choice import Choice
from attnscope.core.attention.seam import attend
from attnscope.core.pairs import pair_means
from attnscope.models.hf.assembling import wrap
from attnscope.questions.patch import Patching
from attnscope.studies.patch.pairs import make_pair_batches, read_pairs


def random_pairs(ids: list[int], spell: Any, n: int, length: int) -> list[dict[str, Any]]:
    """Pairs of random tokens that differ at the second one; those whose text is read back otherwise fall out."""
    chance = np.random.default_rng(0)
    made = []
    for _ in range(n):
        clean = chance.choice(ids, length).tolist()
        corrupt = [clean[0], int(chance.choice(ids)), *clean[2:]]
        right, wrong = chance.choice(ids, 2, replace=False).tolist()
        texts = {"clean": "".join(map(spell, clean)), "corrupt": "".join(map(spell, corrupt))}
        made.append({**texts, "right": right, "wrong": wrong})
    return made


def speed(name: str, n_pairs: int, n_tokens: int, step: int) -> dict[str, Any]:
    """Return all heads' z, by the time of the half forwards that this needs."""
    model = attnscope.load(name)
    words = [
        i
        for i in model.tokenizer.ordinary_ids()
        if (w := model.tokenizer.spell(i))[:1] == " " and w[1:].isalpha()
    ]
    pairs = [
        pair
        for pair in random_pairs(words, model.tokenizer.spell, 4 * n_pairs, n_tokens)
        if all(len(model.tokenizer.encode(pair[which])) == n_tokens for which in ("clean", "corrupt"))
    ][:n_pairs]
    read, problems = read_pairs(model, attnscope.Pairs(pairs))
    assert len(read) == n_pairs and not problems, (len(read), problems)
    batches = make_pair_batches(model, read, range(n_pairs))
    layers = tuple(range(0, model.info.n_layers[0], step))
    _ = model.resumes

    def forward() -> None:
        with torch.no_grad():
            for batch in batches:
                model.outputs(batch.corrupt, attend, last=batch.last)

    forward()
    forwards, patching = [], 0.0
    for _ in range(3):
        started = time.process_time()
        forward()
        forwards.append(time.process_time() - started)
    started = time.process_time()
    found = attnscope.patch(model, pairs, attnscope.PatchOptions(choice=Choice(layers=layers)))
    patching = time.process_time() - started
    # From layer l of n on there are n - l layers to compute; over all layers that is half a forward on average.
    n_layers = model.info.n_layers[0]
    needed = float(((n_layers - found["heads"]["layer"] - 0.5) / n_layers).sum() * np.median(forwards))
    return {
        "pairs": n_pairs,
        "tokens": n_tokens,
        "heads": len(found["heads"]),
        "forward_s": float(np.median(forwards)),
        "patching_s": patching,
        "needed_s": needed,
        "ratio": patching / needed,
    }


def random_gpt2() -> Any:
    """Return a GPT-2 whose heads are heard above its networks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    network = GPT2LMHeadModel(
        GPT2Config(n_embd=64, n_head=4, n_layer=4, n_positions=32, vocab_size=97)
    ).eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.normal_(std=0.02 if "mlp" in name else 0.5)
    return network


def rival(folder: str, length: int = 12) -> dict[str, Any]:
    """What TransformerLens finds on a GPT-2, by its own functions and hooks, and attnscope: all heads, and paths.

    Args:
        folder: A trained model; "" = random weights.
    """
    from transformer_lens import patching
    from transformers import GPT2LMHeadModel

    network = (
        GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval() if folder else random_gpt2()
    )
    config = network.config
    theirs = bridge_to(network)
    pairs = random_pairs(list(range(5, config.vocab_size)), lambda number: f" {number}", 32, length)
    ids = {
        k: torch.tensor([[int(i) for i in pair[k].split()] for pair in pairs])
        for k in ("clean", "corrupt")
    }
    rows = torch.arange(len(pairs))
    right, wrong = (torch.tensor([pair[which] for pair in pairs]) for which in ("right", "wrong"))

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return (logits[rows, -1, right] - logits[rows, -1, wrong]).mean()

    model = wrap(network, name="random", check=False)
    _ = model.resumes
    functions = {
        "z": patching.get_act_patch_attn_head_out_all_pos,
        "query": patching.get_act_patch_attn_head_q_all_pos,
        "key": patching.get_act_patch_attn_head_k_all_pos,
        "value": patching.get_act_patch_attn_head_v_all_pos,
        "pattern": patching.get_act_patch_attn_head_pattern_all_pos,
    }
    report: dict[str, Any] = {"model": Path(folder).name or "random", "coverage": coverage()}
    with torch.no_grad():
        logits, cache = theirs.run_with_cache(ids["clean"])
        corrupt_logits, own = theirs.run_with_cache(ids["corrupt"])
        report["logits_differ"] = float((logits - network(ids["clean"]).logits).abs().max())
        for by, function in functions.items():
            started = time.process_time()
            expected = (
                (function(theirs, ids["corrupt"], cache, metric) - metric(corrupt_logits))
                .flatten()
                .numpy()
            )
            middle = time.process_time()
            record = attnscope.patch(model, pairs, attnscope.PatchOptions(by=by))  # type: ignore[arg-type]
            ended = time.process_time()
            ours = record["heads"]["effect"]
            report[by] = {
                "largest_effect": float(np.abs(expected).max()),
                "largest_difference": float(np.abs(ours - expected).max()),
                "times_as_fast": (middle - started) / (ended - middle),
            }
        paths = attnscope.patch(model, pairs, attnscope.PatchOptions(paths=6)).table("paths")
        logits_of = PathsByHooks(theirs, ids["corrupt"], cache, own)
        ends = zip(
            paths["sender"].tolist(), paths["receiver"].tolist(), paths["by"].tolist(), strict=True
        )
        expected = np.array(
            [float(metric(logits_of(*route(*path))) - metric(corrupt_logits)) for path in ends]
        )
        ours = paths["effect"]
        report["paths"] = {
            "edges": len(paths),
            "largest_effect": float(np.abs(expected).max()),
            "largest_difference": float(np.abs(ours - expected).max()),
        }
    return report


def bridge_to(network: Any) -> Any:
    """Return a model of TransformerLens with the weights of a GPT-2, whose tokens are numbers."""
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(network.config.vocab_size)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")),
        bos_token="0",
        eos_token="0",
        pad_token="0",
    )
    with tempfile.TemporaryDirectory() as folder:
        network.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        # It puts its own modules into the network.
        return TransformerBridge.boot_transformers(folder, hf_model=copy.deepcopy(network), device="cpu")


def coverage(n_draws: int = 1000) -> dict[str, dict[str, float]]:
    """How often 95% intervals hold the mean of exponential effects: bootstraps of TransformerLens, and attnscope's."""
    from transformer_lens.utilities.statistics import bootstrap_ci

    chance, shares = np.random.default_rng(0), {}
    for n in (5, 10, 20, 50):
        values = chance.exponential(size=(n, n_draws))
        low, high = (end.numpy() for end in bootstrap_ci(torch.from_numpy(values.T), dim=-1))
        _, our_low, our_high, _ = pair_means(values)
        shares[f"{n} pairs"] = {
            "bootstrap": float(((low <= 1) & (high >= 1)).mean()),
            "attnscope": float(((our_low <= 1) & (our_high >= 1)).mean()),
        }
    return shares


def route(sender: str, receiver: str, by: str) -> tuple[tuple[int, int], tuple[int, int] | None, str]:
    """(layer, head) that sends, the one that receives (None: the logits), and through what."""
    places = [
        tuple(map(int, name[1:].split("H"))) if name != "logits" else None for name in (sender, receiver)
    ]
    return (*places, by[:1])  # type: ignore[return-value]


class PathsByHooks:
    """Path patching by the hooks of TransformerLens: a head gets its clean z, all later heads keep their own."""

    def __init__(self, model: Any, ids: torch.Tensor, clean: Any, own: Any) -> None:
        self._model, self._ids, self._clean, self._own = model, ids, clean, own

    def __call__(
        self, sender: tuple[int, int], receiver: tuple[int, int] | None, by: str
    ) -> torch.Tensor:
        """Return the logits that change by the paths from the sender to the receiver alone."""

        def freeze(z: torch.Tensor, hook: Any) -> torch.Tensor:
            z[:] = self._own[hook.name]
            if hook.layer() == sender[0]:
                z[:, :, sender[1]] = self._clean[hook.name][:, :, sender[1]]
            return z

        reached: dict[str, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, hook: Any) -> None:
            reached[hook.name] = tensor.clone()

        hooks: list[Any] = [(lambda name: name.endswith("hook_z"), freeze)]
        if receiver is None:
            return self._run(hooks)
        name = f"blocks.{receiver[0]}.attn.hook_{by}"
        self._run([*hooks, (name, keep)])

        def put(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
            tensor[:, :, receiver[1]] = reached[hook.name][:, :, receiver[1]]
            return tensor

        return self._run([(name, put)])

    def _run(self, hooks: list[Any]) -> torch.Tensor:
        logits: torch.Tensor = self._model.run_with_hooks(self._ids, fwd_hooks=hooks)
        return logits


def figures(name: str, path: str) -> dict[str, Any]:
    """Return the ten strongest heads, how attribution ranks them, the time, and what half of the pairs would say."""
    model = attnscope.load(name)
    started = time.process_time()
    found = attnscope.patch(model, path, attnscope.PatchOptions(attribution=0))
    seconds = time.process_time() - started
    found.save(f"{Path(path).stem}.npz")
    return {"seconds": seconds, **summary(found)}


def summary(found: Patching) -> dict[str, Any]:
    best = found.strongest()[:10]
    halvings = [halve(found["by_pair"].astype(np.float64), seed) for seed in range(20)]
    effects = found.table("heads").interval("effect")
    return {
        "pairs": len(found["pairs"]),
        "total": found.total().tolist(),
        "strongest": {found.head_names[row]: effects[row].tolist() for row in best},
        "attribution_rank_agreement": found.options.get("rank_agreement"),
        "halves_rank_agreement": [agreement for agreement, _ in halvings],
        "of_ten_strongest_in_both_halves": [n for _, n in halvings],
    }


def halve(by_pair: np.ndarray, seed: int) -> tuple[float, int]:
    """The rank correlation of two random halves of the pairs, and how many of the ten strongest heads both have."""
    order = np.random.default_rng(seed).permutation(by_pair.shape[1])
    halves = [by_pair[:, some].mean(1) for some in np.array_split(order, 2)]
    strongest_of = [set(np.argsort(-np.abs(half))[:10].tolist()) for half in halves]
    return float(spearmanr(*halves).statistic), len(strongest_of[0] & strongest_of[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--speed", metavar="MODEL")
    parser.add_argument(
        "--rival", nargs="?", const="", metavar="MODEL", help="a GPT-2; by default random weights"
    )
    parser.add_argument("--figures", nargs=2, metavar=("MODEL", "PAIRS"))
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument(
        "--layers-step", type=int, default=1, help="every so many layers alone are patched"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"benchmark": "patching"}
    if given.speed:
        found["speed"] = speed(given.speed, given.pairs, given.tokens, given.layers_step)
    if given.rival is not None:
        found["rival"] = rival(given.rival)
    if given.figures:
        found["figures"] = figures(*given.figures)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
