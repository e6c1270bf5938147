"""What attention follows from: means of queries and keys by plain loops, planted causes, and models that hide them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModel

import attnscope
from attnscope.core.questions.mean_vectors import SWEEPS, mean_vectors
from attnscope.corpus import count_tokens
from attnscope.models.inside.around import TurnWatch
from attnscope.models.model import Model
from attnscope.records.heads.descriptions import Descriptions, Sources
from attnscope.records.heads.findings import Findings
from attnscope.records.heads.order import sort_heads
from attnscope.studies.describe import sources
from attnscope.studies.describe.rows import Group, measure
from attnscope.studies.describe.sample import DescribeOptions, draw
from attnscope.studies.describe.sources import FoundSources, find_sources
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.inputs.texts import special_ids, texts_of
from attnscope.studies.measuring.head_blocks import Frequencies
from attnscope.views.describe.terminal import description_table
from tests.conftest import write_tiny

RNG = np.random.default_rng(5)
TEXTS = ["".join(RNG.choice(list("abcdefg ,.'"), 21)) + " the cat" for _ in range(24)]
SMALL = {"hidden_size": 12, "num_key_value_heads": 1, "head_dim": 4}
ENDS = {"bos_token_id": 2, "eos_token_id": 3}
FAMILIES: dict[str, dict[str, Any]] = {"bert": {}, "gpt2": ENDS, "llama": SMALL}


def tiny(folder: Path, family: str, **more: Any) -> Model:
    return attnscope.load(str(write_tiny(folder / family, family, **FAMILIES.get(family, {}), **more)))


def found_in(
    model: Model, heads: tuple[tuple[int, int], ...] | None = None, texts: list[str] = TEXTS
) -> tuple[FoundSources, list[Group]]:  # fmt: skip
    """What heads' attention follows from, and the rows; without fitting descriptions."""
    corpus = texts_of(texts)
    sample = draw(model, corpus, DescribeOptions())
    counts = count_tokens(corpus, model.tokenizer.encode, special_ids(model))
    groups = measure(model, sample, Frequencies.of_counts(counts), heads=heads)
    return find_sources(model, sample, groups), groups


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(tmp_path_factory.mktemp("shared"), "llama")


def share(found: Sources, name: str) -> float:
    value: float = getattr(found, name).value
    return value


# Means ----------------------------------------------------------------------------------------------------------


def shrunken_means(vectors: Any, groups: Any) -> dict[int, Any]:
    """What each group adds, (width,), by loops; of vectors whose mean is about 0."""
    members = {g: [i for i in range(len(groups)) if groups[i] == g] for g in set(groups.tolist())}
    n, k = len(groups), len(members)
    if k < 2 or k == n:
        return dict.fromkeys(members, vectors[0] * 0)
    means = {g: sum(vectors[i] for i in mine) / len(mine) for g, mine in members.items()}
    between = sum(len(mine) * float(means[g] @ means[g]) for g, mine in members.items())
    within = max(sum(float(x @ x) for x in vectors) - between, 0.0) / (n - k)
    spread = (between / (k - 1) - within) / ((n - sum(len(mine) ** 2 for mine in members.values()) / n) / (k - 1))
    if spread <= 0:
        return dict.fromkeys(members, vectors[0] * 0)
    return {g: len(mine) * means[g] / (len(mine) + within / spread) for g, mine in members.items()}


def means_by_loops(vectors: Any, types: Any, positions: Any) -> tuple[Any, dict[str, tuple[dict[int, Any], ...]]]:
    """The mean of one head's vectors, and what types and positions add, by what is known."""
    whole = vectors.mean(0)
    rest = vectors - whole
    by_type, by_position = shrunken_means(rest, types), shrunken_means(rest, positions)
    of_type, of_position = by_type, by_position
    for _ in range(SWEEPS):
        of_type = shrunken_means(np.stack([x - of_position[p] for x, p in zip(rest, positions, strict=True)]), types)
        of_position = shrunken_means(np.stack([x - of_type[t] for x, t in zip(rest, types, strict=True)]), positions)
    return whole, {"position": ({}, by_position), "token": (by_type, {}), "both": (of_type, of_position)}


def test_means_are_those_of_loops() -> None:
    types, positions = RNG.integers(0, 5, 60), RNG.integers(0, 7, 60)
    vectors = RNG.normal(size=(60, 2, 3)) + RNG.normal(size=(5, 2, 3))[types] + RNG.normal(size=(7, 2, 3))[positions]
    found = mean_vectors(vectors, types, positions, 6)
    for head in range(2):
        whole, known = means_by_loops(vectors[:, head], types, positions)
        for name, made in {
            "position": found.given_position(9), "token": found.given_token(np.array([4, 5, 0])),
            "both": found.given_both(np.array([4, 5, 0]), ),
        }.items():  # fmt: skip
            by_type, by_position = known[name]
            for at, vector in enumerate(made[head]):
                kind = None if name == "position" else (4, 5, 0)[at]
                expected = whole + by_type.get(kind, 0) + (0 if name == "token" else by_position.get(at, 0))
                np.testing.assert_allclose(vector, expected, atol=1e-9)


def test_parts_that_add_up_are_told_apart_and_labels_that_mean_nothing_add_nothing() -> None:
    positions = np.tile(np.arange(8), 40)
    types = np.where(positions == 0, 0, RNG.integers(1, 9, 320))  # [CLS] is always first
    parts = RNG.normal(size=(9, 1, 4)), RNG.normal(size=(8, 1, 4))
    vectors = parts[0][types] + parts[1][positions]
    found = mean_vectors(vectors, types, positions, 9)
    np.testing.assert_allclose(found.given_both(types[:8])[0], vectors[:8, 0], atol=0.02)
    noise = mean_vectors(RNG.normal(size=(320, 1, 4)), types, positions, 9)
    assert np.abs(noise.of_type).max() < 0.2 and np.abs(noise.by_position).max() < 0.2
    alone = mean_vectors(vectors, np.arange(320), positions, 320)  # every type occurs once
    assert not alone.by_type.any()


# Scores by loops ------------------------------------------------------------------------------------------------


def turned(vector: Any, angles: Any) -> Any:
    """Llama's rotary positions: column i with column i + d / 2; angles may be several, which are averaged over."""
    half = len(vector) // 2
    cos, sin = np.cos(angles).mean(0), np.sin(angles).mean(0)
    first, second = vector[:half], vector[half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def expected_shares(model: Model, family: str, network: Any, layer: int, head: int) -> dict[str, float]:
    """The three shares of one head, from transformers' own hidden states and weights, in plain float64 loops."""
    sample = draw(model, texts_of(TEXTS[:8]), DescribeOptions())
    kept: list[Any] = []
    config = network.config
    if family == "bert":
        of = network.encoder.layer[layer].attention.self
        modules, split = (of.query, of.key), False
    elif family == "gpt2":
        modules, split = (network.h[layer].attn.c_attn,), True
    else:
        of = network.layers[layer].self_attn
        modules, split = (of.q_proj, of.k_proj), False
    handles = [m.register_forward_hook(lambda *given: kept.append(given[2][0].double().numpy())) for m in modules]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_head = head // (config.num_attention_heads // getattr(config, "num_key_value_heads", config.num_attention_heads))
    queries, keys, weights = [], [], []
    for unit in sample:
        kept.clear()
        with torch.no_grad():
            out = network(input_ids=torch.from_numpy(unit.chunk.tokens.ids)[None], output_attentions=True)
        query, key = (kept[0][:, : config.hidden_size], kept[0][:, config.hidden_size :]) if split else kept
        queries.append(query[:, head * width : (head + 1) * width])
        keys.append(key[:, kv_head * width : (kv_head + 1) * width])
        weights.append(out.attentions[layer][0, head].double().numpy())
    for handle in handles:
        handle.remove()
    fitted = [at for at, unit in enumerate(sample) if unit.fits]
    ids = np.concatenate([sample[at].chunk.tokens.ids for at in fitted])
    positions = np.concatenate([np.arange(len(sample[at].chunk)) for at in fitted])
    means = [means_by_loops(np.concatenate([of[at] for at in fitted]), ids, positions) for of in (queries, keys)]
    speeds = 10_000.0 ** (-np.arange(0, width, 2) / width)
    nats, left = 0.0, dict.fromkeys(sources.KNOWN, 0.0)
    for unit, a in zip(sample, weights, strict=True):
        tokens = unit.chunk.tokens
        if unit.fits:
            continue
        rows = []
        for q in unit.queries:
            free = [k for k in range(1, len(tokens)) if not tokens.special[k] and (family == "bert" or k <= q)]
            if not tokens.special[q] and len(free) > 1:
                rows.append((int(q), free))
        for q, free in rows:
            mass = sum(a[q, k] for k in free) / len(rows)
            b = [a[q, k] / sum(a[q, k] for k in free) for k in free]
            nats += mass * sum(x * math.log(x * len(free)) for x in b if x > 0)
            for known in sources.KNOWN:
                sides = []
                for side in (0, 1):
                    whole, parts = means[side]
                    by_type, by_position = parts[known]
                    vectors = {}
                    for at in [q] if side == 0 else free:
                        vector = whole + by_type.get(int(tokens.ids[at]), 0) + by_position.get(at, 0)
                        if family == "llama":
                            angles = np.arange(len(tokens)) if known == "token" else np.array([at])
                            vector = turned(vector, angles[:, None] * speeds)
                        vectors[at] = vector
                    sides.append(vectors)
                scores = np.array([sides[0][q] @ sides[1][k] / math.sqrt(width) for k in free])
                logs = scores - scores.max() - math.log(np.exp(scores - scores.max()).sum())
                left[known] += mass * sum(x * (math.log(x) - y) for x, y in zip(b, logs, strict=True) if x > 0)
    return {known: 1 - left[known] / nats for known in sources.KNOWN}


@pytest.mark.parametrize(
    "family", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2")), "llama"]
)
def test_shares_are_those_of_loops(tmp_path: Path, family: str) -> None:
    model = tiny(tmp_path, family)
    network = AutoModel.from_pretrained(tmp_path / family, attn_implementation="eager").eval()
    found, _ = found_in(model, texts=TEXTS[:8])
    assert found.unseen is not None and 0 <= found.unseen < 0.2 and not found.reason
    of_head = found.heads[model.info.kinds[0], 1, 2]
    for known, expected in expected_shares(model, family, network, 1, 2).items():
        estimate = getattr(of_head, known)
        assert estimate.value == pytest.approx(expected, abs=4e-3), known
        assert estimate.low <= estimate.value <= estimate.high


# Planted causes -------------------------------------------------------------------------------------------------


def edited(folder: Path, part: str, value: float) -> Model:
    """A model whose weights that a name ends with are all one number."""
    state = load_file(folder / "model.safetensors")
    assert (names := [name for name in state if name.endswith(part)])
    save_file(state | {name: torch.full_like(state[name], value) for name in names}, folder / "model.safetensors")
    return attnscope.load(str(folder))


@pytest.mark.parametrize(
    ("family", "part", "cause", "other"),
    [
        pytest.param("bert", "word_embeddings.weight", "position", "token", marks=pytest.mark.slow),
        ("bert", "position_embeddings.weight", "token", "position"),
        pytest.param("gpt2", "wte.weight", "position", "token", marks=pytest.mark.slow),
        ("llama", "embed_tokens.weight", "position", "token"),
    ],
)
def test_attention_follows_from_what_it_depends_on(
    tmp_path: Path, family: str, part: str, cause: str, other: str
) -> None:
    write_tiny(tmp_path, family, **FAMILIES[family])
    model = edited(tmp_path, part, 0.3)
    found, _ = found_in(model)
    for head in range(3):
        of_head = found.heads[model.info.kinds[0], 0, head]
        assert share(of_head, cause) > 0.95 and share(of_head, "both") > 0.95
        assert share(of_head, other) < 0.2


def test_labels_at_random_predict_nothing(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    monkeypatch.setattr(sources._Study, "_types", lambda self, ids: chance.integers(0, 20, len(ids)))
    found, _ = found_in(llama)
    assert np.abs([share(of_head, "token") for of_head in found.heads.values()]).max() < 0.05


# What is unknown ------------------------------------------------------------------------------------------------


def test_turns_that_cannot_be_seen_are_told(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TurnWatch, "_note", lambda *given: None)
    found, groups = found_in(llama, ((1, 0),))  # the first layer tells it of all
    assert groups and "positions turn" in found.reason and not found.heads


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3", SMALL),  # queries and keys are normed
        ("gemma2", {**SMALL, **ENDS}),  # a soft cap, a window
        ("phi", {"hidden_size": 24, **ENDS}),  # half of the columns are turned
        ("t5", {"d_model": 24, "d_kv": 8, "num_heads": 3, "num_layers": 2, "decoder_start_token_id": 0, **ENDS}),
    ],
)
def test_first_layers_without_positions_in_their_states_follow_from_both(
    tmp_path: Path, family: str, more: dict[str, Any]
) -> None:
    found, _ = found_in(attnscope.load(str(write_tiny(tmp_path, family, **more))))
    first = {place: of for place, of in found.heads.items() if place[1] == 0 and place[0] != "cross"}
    assert len(first) >= 3 and not found.reason
    for of_head in first.values():
        assert share(of_head, "both") > 0.99 > share(of_head, "token")


def test_dense_weights_have_no_sources(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama, "info", replace(llama.info, path="eager"))
    found, groups = found_in(llama)
    assert groups and not found.heads and "does not show" in found.reason and found.unseen is None


def test_layers_in_several_parts_give_the_same(llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = found_in(llama)
    monkeypatch.setattr(sources, "MOST_BYTES", 1)
    assert found_in(llama)[0].heads == whole.heads


# What is shown --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    model = tiny(tmp_path_factory.mktemp("shown"), "bert")
    return attnscope.heads(model, TEXTS, HeadsOptions(describe=DescribeOptions(queries=100)))


def test_heads_are_ordered_by_their_sources(findings: Findings, tmp_path: Path) -> None:
    columns = findings.head_table().flat()
    for name in ("position", "token", "both"):
        assert f"from_{name}_low" in columns and f"from_{name}_high" in columns
        values = findings.head_table().numbers()[f"from_{name}"]
        ordered = sort_heads(findings, f"from_{name}")
        first = int(np.nanargmax(values))
        assert (ordered[0].layer, ordered[0].head) == (findings.heads[first].layer, findings.heads[first].head)
    findings.save(tmp_path / "heads.npz")
    again = attnscope.load_record(tmp_path / "heads.npz")
    assert isinstance(again, Findings) and repr(again.descriptions) == repr(findings.descriptions)
    first_head = json.loads(findings.to_json())["descriptions"]["heads"][0]
    assert set(first_head["active"]["sources"]) == {"position", "token", "both"}


def said(findings: Findings, width: int) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(description_table(findings))
    return captured.get()


def test_the_table_shows_them_where_there_is_room(findings: Findings) -> None:
    described = findings.descriptions
    assert isinstance(described, Descriptions)
    assert "position  token  both" in said(findings, 130)
    assert "the rest needs context. Medians:" in " ".join(said(findings, 80).split())
    bare = tuple(replace(one, active=replace(one.active, sources=None)) for one in described.heads if one.active)
    unknown = replace(findings, descriptions=replace(described, heads=bare, unseen=None, no_sources="it is hidden"))
    assert "position, token and both are unknown: it is hidden." in " ".join(said(unknown, 200).split())
