"""Roles by what heads write: planted heads are named by what they do, and random ones are not named."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
from attnscope.corpus import CorpusText
from attnscope.models.own.decoder import OwnDecoder, own_decoder
from attnscope.records.heads.findings import Findings
from attnscope.studies.heads.merging import merge_findings
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.heads.rules import RULES
from attnscope.studies.running.workers import Workers

BEHAVIOURS = {name for name, rule in RULES.items() if rule.does}
WORDS, PLACES, D_HEAD = 16, 32, 40


def planted() -> OwnDecoder:
    """L0H0 looks at the previous token; in layer 1 three heads look where induction looks, and three things come of it.

    L1H0 raises what it attends to, L1H1 writes nothing, L1H2 lowers it by half as much. The others do nothing.
    """
    network = own_decoder(
        WORDS, n_layers=2, n_heads=4, d_model=4 * D_HEAD, positions="learned", norm=False, max_tokens=PLACES
    )
    code, place, previous, said = slice(0, 16), slice(16, 48), slice(48, 64), slice(64, 80)
    sharp = 30 * D_HEAD**0.5
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.embed.weight[:, code] = torch.eye(WORDS)
        assert network.position is not None
        network.position.weight[:, place] = torch.eye(PLACES)
        network.unembed.weight[:, said] = torch.eye(WORDS)

        def head(layer: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
            """Query, key and value rows, and the output's columns, of a head."""
            rows = slice(number * D_HEAD, (number + 1) * D_HEAD)
            attention = network.layers[layer].attention
            query, key, value = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
            return query[rows], key[rows], value[rows], attention.out_proj.weight[:, rows]

        query, key, value, out = head(0, 0)
        query[:PLACES, place] = sharp * torch.eye(PLACES).roll(1, 1)
        key[:PLACES, place] = torch.eye(PLACES)
        value[:WORDS, code] = torch.eye(WORDS)
        out[previous, :WORDS] = torch.eye(WORDS)
        for number, gain in enumerate((4.0, 0.0, -2.0)):
            query, key, value, out = head(1, number)
            query[:WORDS, code] = sharp * torch.eye(WORDS)
            key[:WORDS, previous] = torch.eye(WORDS)
            value[:WORDS, code] = torch.eye(WORDS)
            out[said, :WORDS] = gain * torch.eye(WORDS)
    return network


def repeated_texts(n: int, seed: int = 0) -> list[str]:
    """Different words in a random order, twice."""
    chance = np.random.default_rng(seed)
    texts = []
    for _ in range(n):
        half = chance.permutation(WORDS)[: chance.integers(11, 15)]
        texts.append(" ".join(str(word) for word in (*half, *half)))
    return texts


def study(network: OwnDecoder, texts: Sequence[str]) -> Findings:
    return attnscope.heads(attnscope.load(network), list(texts), HeadsOptions(writes=True))


def roles_of(findings: Findings, name: str) -> list[str]:
    head = next(head for head in findings.heads if head.name == name)
    return [role.name for role in head.roles]


@pytest.fixture(scope="module")
def found() -> Findings:
    return study(planted(), repeated_texts(20))


def test_planted_heads_are_named_by_what_they_do(found: Findings) -> None:
    assert not found.run.get("failures")
    assert roles_of(found, "L1H0")[0] == "induction"
    assert set(roles_of(found, "L1H0")) & BEHAVIOURS == {"copying", "induction_by_effect"}
    assert set(roles_of(found, "L1H2")) & BEHAVIOURS == {"copy_suppression"}
    assert "induction" in roles_of(found, "L1H2")


def test_a_head_that_looks_and_writes_nothing_has_the_role_of_looking_alone(found: Findings) -> None:
    roles = roles_of(found, "L1H1")
    assert "induction" in roles and not set(roles) & BEHAVIOURS
    silent = next(head for head in found.heads if head.name == "L1H1")
    assert silent.measures["induction_weight"].value > 0.9 and silent.measures["induction_nats"].value == 0


def test_no_other_head_has_a_role_of_behaviour(found: Findings) -> None:
    named = {head.name for head in found.heads for role in head.roles if role.name in BEHAVIOURS}
    assert named == {"L1H0", "L1H2"}


def test_what_is_moved_is_what_was_planted(found: Findings) -> None:
    """L1H0 moves 4 nats onto what it attends to, less on other tokens by nothing; even attention a part of that."""
    head = next(head for head in found.heads if head.name == "L1H0")
    moved = head.measures["induction_nats"]
    assert moved.value == pytest.approx(4 * head.measures["induction_weight"].value, abs=0.05)
    assert 0 < moved.uniform < 0.5
    role = next(role for role in head.roles if role.name == "induction_by_effect")
    assert role.baseline == pytest.approx(moved.uniform) and role.value == moved.value and role.q < 0.001
    assert found.role_facts("induction_by_effect").does == "raises what followed"


def test_few_texts_are_tentative_and_too_few_give_nothing() -> None:
    few = study(planted(), repeated_texts(5))
    head = next(head for head in few.heads if head.name == "L1H0")
    assert all(role.tentative for role in head.roles if role.name in BEHAVIOURS)
    assert any(role.name in BEHAVIOURS for role in head.roles)
    fewer = study(planted(), repeated_texts(2))
    assert not any(role.name in BEHAVIOURS for head in fewer.heads for role in head.roles)


def random_roles(seed: int, n_texts: int = 25) -> list[str]:
    network = own_decoder(WORDS, n_layers=2, n_heads=4, d_model=32, seed=seed)
    chance = np.random.default_rng(seed)
    texts = [" ".join(map(str, chance.integers(0, WORDS, chance.integers(15, 30)))) for _ in range(n_texts)]
    findings = study(network, [*texts, *repeated_texts(n_texts, seed)])
    return [
        f"{head.name} {role.name} {role.value:.2f}"
        for head in findings.heads
        for role in head.roles
        if role.name in BEHAVIOURS
    ]


def test_random_heads_have_no_role_of_behaviour() -> None:
    assert random_roles(0, 12) == []


@pytest.mark.slow
def test_random_heads_of_many_models_have_no_role_of_behaviour() -> None:
    assert [role for seed in range(1, 31) for role in random_roles(seed)] == []


# Many texts, many cores -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("worker_here")
def test_shards_and_workers_give_the_bits_of_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = [CorpusText(index, "texts", index + 1, text) for index, text in enumerate(repeated_texts(6))]
    monkeypatch.setattr("attnscope.studies.heads.study.BLOCK", 2)
    folder = planted().save(tmp_path / "planted")
    model = attnscope.load(str(folder))

    def study(workers: Workers | None = None, **options: Any) -> Findings:
        return attnscope.heads(model, corpus, HeadsOptions(writes=True, chunk=12, stride=9, **options), None, workers)

    whole = study()
    assert whole.corpus["writes"]["n_predictions"] > 0 and not whole.run.get("failures")
    parts = [study(shard=(k, 3)) for k in (1, 2, 3)]
    paths = [part.save(tmp_path / f"{number}.npz") for number, part in enumerate(parts)]
    merged = merge_findings([Findings.load(path) for path in paths[::-1]])
    shared = study(Workers(str(folder), 1, torch.get_num_threads()))
    for other in (merged, shared):
        assert set(other.sums) == set(whole.sums)
        for name, array in whole.sums.items():
            np.testing.assert_array_equal(other.sums[name], array)
        assert repr(other.heads) == repr(whole.heads)  # NaN differs from itself
        assert other.corpus["writes"] == whole.corpus["writes"]


def test_an_interruption_keeps_what_was_done() -> None:
    def interrupt(progress: Any) -> None:
        seen.append(progress)
        if len(seen) == stop:
            raise KeyboardInterrupt

    model = attnscope.load(planted())
    texts = repeated_texts(15)
    seen: list[Any] = []
    stop = -1
    whole = attnscope.heads(model, texts, HeadsOptions(writes=True), interrupt)
    stop, seen = len(seen) - 1, []
    found = attnscope.heads(model, texts, HeadsOptions(writes=True), interrupt)
    assert found.corpus["complete"] is False and not found.run.get("failures")
    assert 0 < found.corpus["writes"]["n_predictions"] < whole.corpus["writes"]["n_predictions"]
    assert found.heads[0].measures["previous_token"] == whole.heads[0].measures["previous_token"]


# What is no copying -----------------------------------------------------------------------------------------------


def of_one_layer(n_words: int, n_places: int) -> tuple[OwnDecoder, Any]:
    """A layer of four heads whose values and outputs are the tokens', and which look nowhere; and how wide they are."""
    width = n_words + n_places
    network = own_decoder(
        n_words, n_layers=1, n_heads=4, d_model=4 * width, positions="learned", norm=False, max_tokens=n_places
    )
    assert network.position is not None
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        network.embed.weight[:, :n_words] = torch.eye(n_words)
        network.unembed.weight[:, width : width + n_words] = torch.eye(n_words)
        network.position.weight[:, n_words:width] = torch.eye(n_places)
    return network, width


@pytest.mark.parametrize("gain", [2.0, pytest.param(-2.0, marks=pytest.mark.slow)])
def test_to_look_at_frequent_words_is_no_copying_and_no_suppression(gain: float) -> None:
    """Words are drawn independently, so nothing can be copied; the bias says frequent ones everywhere."""
    n_words, n_places = 40, 48
    frequency = 1 / (np.arange(n_words) + 2.7)
    frequency /= frequency.sum()
    log_frequency = torch.tensor(np.log(frequency), dtype=torch.float32)
    network, width = of_one_layer(n_words, n_places)
    attention = network.layers[0].attention
    with torch.no_grad():
        network.embed.weight[:, -1] = 1
        network.unembed.weight[:, -1] = log_frequency
        for number, power in enumerate((1.0, 2.0, 3.0, 4.0)):
            rows = slice(number * width, (number + 1) * width)
            attention.q_proj.weight[rows][0, -1] = width**0.5 * power
            attention.k_proj.weight[rows][0, :n_words] = log_frequency
            attention.v_proj.weight[rows][:n_words, :n_words] = torch.eye(n_words)
            attention.out_proj.weight[width : width + n_words, rows][:, :n_words] = gain * torch.eye(n_words)
    chance = np.random.default_rng(0)
    texts = [" ".join(map(str, chance.choice(n_words, chance.integers(30, 48), p=frequency))) for _ in range(60)]
    findings = study(network, texts)
    assert {role.name for head in findings.heads for role in head.roles} & BEHAVIOURS == set()
    assert findings.heads[3].measures["copying_share"].count > 500


@pytest.mark.parametrize("rows", [False, True])
def test_to_look_at_one_offset_is_no_copying(rows: bool) -> None:
    """Lists "w , w , w ," and tables of three columns, where an offset finds the separator that comes."""
    n_words, n_places = 40, 48
    offsets = (1, 2, 3, 5)
    network, width = of_one_layer(n_words, n_places)
    attention = network.layers[0].attention
    with torch.no_grad():
        for number, offset in enumerate(offsets):
            own = slice(number * width, (number + 1) * width)
            shift = torch.diag(torch.ones(n_places - offset), -offset).T
            attention.q_proj.weight[own][:n_places, n_words:width] = 30 * width**0.5 * shift
            attention.k_proj.weight[own][:n_places, n_words:width] = torch.eye(n_places)
            attention.v_proj.weight[own][:n_words, :n_words] = torch.eye(n_words)
            attention.out_proj.weight[width : width + n_words, own][:, :n_words] = 2 * torch.eye(n_words)
    chance = np.random.default_rng(0)

    def line() -> str:
        return " 0 ".join(map(str, chance.integers(2, n_words, 3))) + (" 1" if rows else " 0")

    findings = study(network, [" ".join(line() for _ in range(chance.integers(4, 8))) for _ in range(40)])
    assert {role.name for head in findings.heads for role in head.roles} & BEHAVIOURS == set()
