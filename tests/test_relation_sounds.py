"""Heads that listen to words whose times are known: found where they were planted, and none among random ones."""

import itertools
import json

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from transformers import GenerationConfig

import attnscope
from attnscope.core.attention.seam import AttentionCall
from attnscope.studies.relations import evidence
from attnscope.studies.relations import sounds as relation_sounds
from attnscope.studies.relations.sounds import RELATION, sound_relations
from tests.relation_helpers import Relation
from tests.senses_helpers import WORDS, speech, write_whisper

FRAME_S = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("speech") / "whisper", seconds=2)


@pytest.fixture
def timed(tmp_path):
    """Recordings of four to seven words whose times are drawn at random, on frames."""
    chance = np.random.default_rng(0)
    lines = []
    for number in range(26):
        n = int(chance.integers(4, 8))
        edges = np.sort(chance.choice(np.arange(1, 80), n + 1, replace=False)) * FRAME_S
        words = [
            {
                "word": str(chance.choice(WORDS[3:9])),
                "start": round(float(a), 2),
                "end": round(float(b), 2),
            }
            for a, b in zip(edges[:-1], edges[1:], strict=True)
        ]
        wavfile.write(tmp_path / f"{number}.wav", 16000, speech(1.7) * np.float32(1 - number / 100))
        lines.append(json.dumps({"audio": f"{number}.wav", "words": words}))
    path = tmp_path / "timed.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def plant(monkeypatch, timed, misses=0.1, *, rival=False):
    """Random attention, and L1H2 that listens to a word in the row before each of its tokens, mostly.

    The rival, L0H1, always does so on the recordings of one half, and never on those of the other.
    """
    every = [json.loads(line)["words"] for line in timed.read_text().splitlines()]
    passes = itertools.count()

    def run_probe(model, reading, probe):
        number = next(passes) % len(every)  # a second pass, to time the words, sees the same attention
        words = every[number]
        n = round(reading.sound.window_seconds / FRAME_S)
        chance = np.random.default_rng(number)
        maps = chance.gamma(0.3, size=(2, 3, len(reading.target), n)) + 1e-9
        # The first token is <|startoftranscript|>: a word's row is before it.
        for row, word in enumerate(words):
            first = round(word["start"] / FRAME_S)
            last = round(word["end"] / FRAME_S)
            if chance.random() > misses:
                maps[1, 2, row, first:last] += 50
            if rival and evidence._choose_half(number) == 0:
                maps[0, 1, row, first:last] += 50
        weights = torch.tensor(maps / maps.sum(-1, keepdims=True)).float()[:, None]
        for layer in range(2):
            key = torch.eye(n).expand(1, 3, n, n)
            probe(AttentionCall(layer, "cross", weights[layer].log(), key, key, 1.0))

    monkeypatch.setattr(relation_sounds, "run_probe", run_probe)


def test_a_planted_head_is_found_among_random_ones(folder, timed, tmp_path, monkeypatch, run):
    plant(monkeypatch, timed)
    found = sound_relations(attnscope.load(folder, check=False), [str(timed)])
    one = Relation(found, RELATION)
    assert found["heads"]["kind"][0] == "cross"
    assert found.corpus["of"] == "recordings"
    assert found.corpus["n_texts"] == 26
    assert one.best == (1, 2)
    assert one.best_found
    assert one.found.sum() == 1
    assert 0.8 < one.accuracy[1, 2] < 1
    assert one.mass[1, 2] > 0.8
    assert one.rule.startswith("diagonal")
    assert 0.2 < one.baseline < 0.7
    assert one.accuracy[0].max() < one.baseline
    assert found.alignment_heads == found.as_json()["alignment_heads"] == [[1, 2]]
    saved = found.save(tmp_path / "relations.npz")
    out = run("show", saved).out
    assert out.startswith("L1H2 follows the words: ")
    assert "attnscope heatmap --audio FILE --words --pick L1H2\n" in out
    (line,) = [line for line in out.splitlines() if line.startswith('"alignment_heads"')]
    (tmp_path / "generation_config.json").write_text("{" + line + "}")
    assert GenerationConfig.from_pretrained(tmp_path).alignment_heads == [[1, 2]]
    assert json.loads(run("show", saved, "--json").out)["alignment_heads"] == [[1, 2]]


def test_planted_heads_time_words_on_recordings_that_did_not_choose_them(
    folder, timed, monkeypatch, tmp_path, run
):
    plant(monkeypatch, timed, misses=0)
    found = sound_relations(attnscope.load(folder, check=False), [str(timed)])
    times = found.table("word_times")
    assert list(zip(times["by"].tolist(), times["n_heads"].tolist(), strict=True)) == [
        ("best", 1),
        ("upper half", 3),
    ]
    # Every path begins with the recording: its first word is not scored.
    assert found.options["word_times"] == {
        "n_recordings": 26,
        "n_words": Relation(found, RELATION).n - 26,
    }
    best, upper = range(2)
    assert times["median"][best] < 1e-9
    assert times["mean"][best] < 0.25 * FRAME_S < times["mean"][upper]
    assert times["change"][best] <= 0 == times["change"][upper]


def test_no_recording_is_timed_by_heads_that_it_chose(folder, timed, monkeypatch):
    plant(monkeypatch, timed, rival=True)
    times = sound_relations(attnscope.load(folder, check=False), [str(timed)]).table("word_times")
    # One half chooses the rival, which knows nothing of the other half; timed where it was chosen it would be exact.
    assert times["by"][0] == "best"
    assert times["mean"][0] > 0.05


def test_copies_of_recordings_count_once(folder, timed, run):
    """The same sound and words under two names are one recording; the same sound with other words is one source."""
    lines = timed.read_text().splitlines()[:3]
    copied = []
    for line in lines:
        entry = json.loads(line)
        name = f"copy-of-{entry['audio']}"
        (timed.parent / name).write_bytes((timed.parent / entry["audio"]).read_bytes())
        copied += [
            line,
            json.dumps(entry | {"audio": name}),
            json.dumps(entry | {"words": entry["words"][:2]}),
        ]
    timed.write_text("\n".join(copied))
    told = json.loads(run("relations", "timed.jsonl", "-m", str(folder), "--no-check", "--json").out)
    assert told["corpus"]["n_texts"] == 6
    assert told["corpus"]["n_copies"] == 3


def test_random_heads_and_other_lines(folder, timed, run):
    bad = [
        '{"audio": "0.wav", "words": []}',
        "{",
        '{"audio": "gone.wav", "words": [{"word": "a", "start": 0, "end": 1}]}',
    ]
    for end in ("0.5", "NaN", "Infinity"):
        bad.append(f'{{"audio": "0.wav", "words": [{{"word": "a", "start": 1, "end": {end}}}]}}')
    late = {
        "audio": "1.wav",
        "words": [
            {"word": "cat", "start": 0.1, "end": 0.2},
            {"word": "on", "start": 0.19, "end": 0.4},  # words may overlap
            {"word": "a", "start": 1.6, "end": 9},
        ],
    }
    text = "\n".join([timed.read_text().strip(), *bad, json.dumps(late)])
    (timed.parent / "timed.jsonl").write_text(text)
    status, out, err = run("relations", "timed.jsonl", "-m", str(folder), "--no-check", "--json")
    assert status == 1  # not all could be read
    told = json.loads(out)
    (one,) = told["relations"]
    assert one["relation"] == RELATION
    assert not np.array(told["found"]).any()
    assert told["alignment_heads"] == []
    (left_out,) = told["left_out"]
    assert left_out["reason"] == "words that the recording or the transcript does not reach"
    assert left_out["n"] == 1
    assert [problem["line"] for problem in told["corpus"]["problems"]] == [27, 28, 29, 30, 31, 32]
    assert run("relations", "timed.jsonl", "-m", str(folder), "--no-check").out.startswith(
        "No head follows the words"
    )
    assert run("relations", "timed.jsonl", "-m", str(folder), "--only", "obj")[0] == 2
    status, _, err = run("relations", "timed.jsonl", "-m", "own")
    assert status == 1
    assert "takes texts, not recordings" in err
