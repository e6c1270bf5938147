"""Heads that listen to words whose times are known: found where they were planted, and none among random ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import wavfile

import attnscope
from attnscope.core.attention.seam import AttentionCall
from attnscope.studies.relations import sounds as relation_sounds
from attnscope.studies.relations.sounds import NAME, sound_relations
from tests.conftest import Run
from tests.senses_helpers import WORDS, speech, write_whisper

FRAME_S = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("speech") / "whisper", seconds=2)


@pytest.fixture
def timed(tmp_path: Path) -> Path:
    """Recordings of four to seven words whose times are drawn at random, on frames."""
    chance = np.random.default_rng(0)
    lines = []
    for number in range(26):
        n = int(chance.integers(4, 8))
        edges = np.sort(chance.choice(np.arange(1, 80), n + 1, replace=False)) * FRAME_S
        words = [
            {"word": str(chance.choice(WORDS[3:9])), "start": round(float(a), 2), "end": round(float(b), 2)}
            for a, b in zip(edges[:-1], edges[1:], strict=True)
        ]
        wavfile.write(tmp_path / f"{number}.wav", 16000, speech(1.7))
        lines.append(json.dumps({"audio": f"{number}.wav", "words": words}))
    path = tmp_path / "timed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def plant(monkeypatch: pytest.MonkeyPatch, timed: Path, misses: float = 0.1) -> None:
    """Random attention, and L1H2 that listens to a word in the row before each of its tokens, mostly."""
    told = iter(json.loads(line) for line in timed.read_text().splitlines())
    chance = np.random.default_rng(1)

    def run_probe(model: Any, reading: Any, probe: Any) -> None:
        words, n = next(told)["words"], round(reading.sound.window_seconds / FRAME_S)
        maps = chance.gamma(0.3, size=(2, 3, len(reading.target), n)) + 1e-9
        for number, word in enumerate(words):  # the first token is <|startoftranscript|>: a word's row is before it
            first, last = round(word["start"] / FRAME_S), round(word["end"] / FRAME_S)
            if chance.random() > misses:
                maps[1, 2, number, first:last] += 50
        weights = torch.tensor(maps / maps.sum(-1, keepdims=True)).float()[:, None]
        for layer in range(2):
            key = torch.eye(n).expand(1, 3, n, n)
            probe(AttentionCall(layer, "cross", weights[layer].log(), key, key, 1.0))

    monkeypatch.setattr(relation_sounds, "run_probe", run_probe)


def test_a_planted_head_is_found_among_random_ones(
    folder: Path, timed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, timed)
    found = sound_relations(attnscope.load(folder, check=False), [str(timed)])
    one = found[NAME]
    assert (found.kind, found.corpus["of"], found.corpus["n_texts"]) == ("cross", "recordings", 26)
    assert one.best == (1, 2) and one.best_found and one.found.sum() == 1
    assert 0.8 < one.accuracy[1, 2] < 1 and one.mass[1, 2] > 0.8
    assert one.rule.startswith("diagonal") and 0.2 < one.baseline < 0.7
    assert one.accuracy[0].max() < one.baseline
    assert found.run["notes"] == ["Heads that listen to the words: attnscope heatmap --audio … --times --pick L1H2"]
    (listed,) = attnscope.export(found, "whisper", tmp_path / "generation_config.json")
    assert json.loads(listed.read_text()) == {"alignment_heads": [[1, 2]]}


def test_random_heads_and_other_lines(folder: Path, timed: Path, run: Run) -> None:
    bad = [
        '{"audio": "0.wav", "words": []}',
        "{",
        '{"audio": "gone.wav", "words": [{"word": "a", "start": 0, "end": 1}]}',
    ]
    bad.append('{"audio": "0.wav", "words": [{"word": "a", "start": 1, "end": 0.5}]}')
    late = {
        "audio": "1.wav",
        "words": [{"word": "cat", "start": 0.1, "end": 0.2}, {"word": "a", "start": 1.6, "end": 9}],
    }
    text = "\n".join([timed.read_text().strip(), *bad, json.dumps(late)])
    (timed.parent / "timed.jsonl").write_text(text)
    status, out, err = run("relations", "timed.jsonl", "-m", str(folder), "--no-check", "--json")
    assert status == 1  # not all could be read
    told = json.loads(out)
    (one,) = told["relations"]
    assert one["name"] == NAME and not np.array(one["found"]).any()
    assert one["left_out"] == {"words that the recording or the transcript does not reach": 1}
    assert [problem["line"] for problem in told["corpus"]["problems"]] == [27, 28, 29, 30]
    assert "No head listens to the words surely enough" in told["run"]["notes"][0]
    assert run("relations", "timed.jsonl", "-m", str(folder), "--combine")[0] == 2
    status, _, err = run("relations", "timed.jsonl", "-m", "own")
    assert status == 1 and "takes texts, not recordings" in err
