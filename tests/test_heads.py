"""The study of heads: what it finds on models that are known, and that nothing depends on how the work was split."""

import gc
import io
import signal
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnscope
import attnscope.studies.heads as study
from attnscope.core.measures import catalogue
from attnscope.corpus import CorpusText, chunks
from attnscope.errors import AttnscopeError
from attnscope.host import delay_interrupts
from attnscope.models.own import roles as own_roles
from attnscope.records.ablation import Effect
from attnscope.records.findings import Findings, Head
from attnscope.studies.heads import HeadsOptions, heads
from attnscope.studies.merging import merge_findings
from attnscope.studies.roles import FEWEST_TEXTS
from attnscope.studies.tally import OFFSETS, tallies_of
from attnscope.views.heads_summary import role_notes
from tests import rounding
from tests.conftest import VOCABULARY, write_tiny, write_tokenizer
from tests.processes import python

SAMPLES = Path(__file__).parent.parent / "sample_texts"
SENTENCES = [line for line in (SAMPLES / "sentences.txt").read_text("utf-8").splitlines() if line.strip()]


@pytest.fixture(scope="module")
def own_causal() -> Any:
    return attnscope.load("own-causal")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 texts, so that a few texts make several."""
    monkeypatch.setattr(study, "BLOCK", 4)


def names_of(head: Head) -> set[str]:
    return {role.name for role in head.roles}


def head_of(found: Findings, name: str) -> Head:
    return next(head for head in found.heads if head.name == name)


def require_same(one: Findings, other: Findings) -> None:
    """Bit for bit, but for the order in which arrays are held."""
    assert one.as_json() == other.as_json()
    assert sorted(one.sums) == sorted(other.sums)
    for name, array in one.sums.items():
        np.testing.assert_array_equal(array, other.sums[name])


# What is found ---------------------------------------------------------------------------------------------------


# Few of these texts repeat a token, and few sentences have a punctuation mark before their last one: what such a
# measure counts is the evidence of so many texts.
TENTATIVE = {
    ("own-causal", "sentences"): {"L0H5 delimiter": 9.9},
    ("own", "multilingual"): {"L0H4 same_token": 7.5, "L1H1 induction": 6.9, "L1H4 same_token": 7.2},
    ("own-causal", "multilingual"): {"L0H4 same_token": 7.2, "L1H1 induction": 6.9, "L1H4 same_token": 7.2},
}


@pytest.mark.parametrize("name", ["own", "own-causal"])
@pytest.mark.parametrize(("file", "split"), [("sentences", "line"), ("alice", "paragraph"), ("multilingual", "line")])
def test_every_head_of_the_glass_box_is_named_right(name: str, file: str, split: Any) -> None:
    found = heads(attnscope.load(name), attnscope.Corpus([SAMPLES / f"{file}.txt"], split=split))
    assert found.corpus["n_texts"] >= 20
    assert {(head.layer, head.head): names_of(head) for head in found.heads} == {
        place: set(known) for place, known in own_roles(name).items()
    }
    assert {(head.layer, head.head): head.roles[0].name for head in found.heads} == {
        place: known[0] for place, known in own_roles(name).items()
    }
    roles = [(f"L{head.layer}H{head.head}", role) for head in found.heads for role in head.roles]
    for _, role in roles:
        assert role.tentative == (role.effective_texts is not None and role.effective_texts < FEWEST_TEXTS)
    few = {f"{place} {role.name}": round(role.effective_texts or 0, 1) for place, role in roles if role.tentative}
    assert few == TENTATIVE.get((name, file), {})


def test_minilm_on_prose(minilm: Any) -> None:
    found = heads(minilm, attnscope.Corpus(SAMPLES / "alice.txt", split="paragraph"))
    assert head_of(found, "L0H2").roles[0].name == "previous_token"
    assert "next_token" in names_of(head_of(found, "L1H8"))
    middle = [head for head in found.heads if 2 <= head.layer <= 4]
    on_cls = [head for head in middle if head.measures["cls"].value > 0.5 * head.resting_share > 0.1]
    assert len(on_cls) > 0.8 * len(middle)
    assert found.corpus["n_texts"] == 54
    assert found.run["model"] == "minilm"


def random_model(folder: Path, kind: str, seed: int) -> Any:
    """A model as transformers draws it before training."""
    import torch
    from transformers import AutoConfig, AutoModel

    sizes = {
        "bert": {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 32},
        "gpt2": {"n_embd": 24, "n_head": 4, "n_layer": 3, "bos_token_id": 3, "eos_token_id": 4},
        "llama": {
            "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3,
            "intermediate_size": 32,
        },
    }[kind]  # fmt: skip
    if not folder.exists():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=len(VOCABULARY), max_position_embeddings=200, **sizes)
        AutoModel.from_config(config).save_pretrained(folder)
        write_tokenizer(folder)
    return attnscope.load(str(folder), check=False, engine="hf").untrained(seed)  # type: ignore[attr-defined]


def words(n: int, chance: np.random.Generator, known: Sequence[str]) -> str:
    return " ".join(chance.choice(known) for _ in range(n))


def random_corpora() -> dict[str, list[str]]:
    """Texts of one length, on which random heads differ from uniform attention all alike; short ones; long ones."""
    chance = np.random.default_rng(0)
    several = ["the", "cat", "a", "b", "dog.", "it", "is,", "who"]
    return {
        "tiny": [words(3, chance, ["the", "cat", "a", "b"]) for _ in range(60)],
        "short": [words(int(chance.integers(1, 7)), chance, several) for _ in range(60)],
        "long": [words(60, chance, several) for _ in range(20)],
    }


def share_with_roles(models: Sequence[Any]) -> float:
    """Of all heads on all corpora, how many have a role but diffuse."""
    found = [heads(model, texts) for model in models for texts in random_corpora().values()]
    all_heads = [head for one in found for head in one.heads]
    return sum(bool(names_of(head) - {"diffuse"}) for head in all_heads) / len(all_heads)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_random_weights_have_no_roles(kind: str, tmp_path: Path) -> None:
    assert share_with_roles([random_model(tmp_path / kind, kind, seed) for seed in range(2)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_random_weights_have_no_roles_whatever_the_seed(kind: str, tmp_path: Path) -> None:
    assert share_with_roles([random_model(tmp_path / kind, kind, seed) for seed in range(20)]) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(("file", "split"), [("sentences", "line"), ("alice", "paragraph")])
def test_the_untrained_minilm_has_no_roles(minilm: Any, file: str, split: Any) -> None:
    texts = attnscope.Corpus(SAMPLES / f"{file}.txt", split=split)
    found = [heads(minilm.untrained(seed), texts) for seed in range(5)]
    all_heads = [head for one in found for head in one.heads]
    assert sum(bool(names_of(head) - {"diffuse"}) for head in all_heads) < 0.01 * len(all_heads)


def test_heads_of_a_fixed_offset_get_no_role_from_texts_that_repeat(own: Any, own_causal: Any) -> None:
    period_two = [f"{a} {b} " * 15 for a, b in zip("abcdefghijkl", "mnopqrstuvwx", strict=True)]
    found = heads(own, period_two)
    for name in ("L0H0", "L1H0"):  # one back, which is what followed the same token before
        assert head_of(found, name).measures["induction"].value > 0.99
        assert names_of(head_of(found, name)) == {"previous_token", "local"}
    two_back = head_of(found, "L1H5")
    assert two_back.measures["same_token"].value > 0.9
    assert names_of(two_back) == {"local"}
    # Nothing tells the heads that really look for like tokens from those that look two back.
    for one in (found, heads(own_causal, period_two)):
        assert not {"same_token", "induction"} & set().union(*map(names_of, one.heads))


def test_a_causal_head_is_compared_with_what_the_mask_forces_on_it(own_causal: Any) -> None:
    found = heads(own_causal, ["one two three four five six seven"])
    uniform = head_of(found, "L0H6").measures["first_token"]
    expected = np.mean([1 / n for n in range(1, 11)])  # [BOS] [REST] seven words [EOS]
    assert uniform.uniform == pytest.approx(expected, abs=1e-7)
    assert uniform.value == pytest.approx(expected, abs=1e-5)  # this head is diffuse
    assert "first_token" not in names_of(head_of(found, "L0H6"))


def test_thresholds_are_options(own: Any) -> None:
    high = heads(own, SENTENCES[:12], HeadsOptions(thresholds={"local": 1.0}))
    assert not any("local" in names_of(head) for head in high.heads)
    assert high.options["roles"]["local"]["threshold"] == 1.0
    assert high.options["roles"]["induction"]["threshold"] == 0.4


def test_with_few_texts_roles_are_tentative(own: Any) -> None:
    few = heads(own, SENTENCES[:9])
    assert names_of(head_of(few, "L0H0")) == {"previous_token", "local"}
    roles = [role for head in few.heads for role in head.roles]
    assert all(role.tentative and role.low > max(role.threshold, role.baseline) and role.q <= 0.05 for role in roles)
    assert 3 <= few.corpus["effective_texts"] < 10
    assert "a role on the evidence of 3 to 10 texts of one length; all together weigh as much as" in role_notes(few)[0]


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_texts_give_no_role_and_that_is_said(own: Any, n: int) -> None:
    found = heads(own, SENTENCES[:n])
    assert not any(head.roles for head in found.heads)
    assert "no role can be given below 3 texts" in role_notes(found)[0]


def test_a_long_text_among_short_ones_does_not_outweigh_them(own: Any) -> None:
    """A text of 30 chunks: as one piece of evidence it leaves that of 1.2 texts, and no role."""
    long = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split()[:1400])
    found = heads(own, [*SENTENCES, long], HeadsOptions(chunk=60))
    assert found.corpus["n_texts"] == 27
    assert found.corpus["effective_texts"] > 27
    assert {(head.layer, head.head): names_of(head) for head in found.heads} == {
        place: set(known) for place, known in own_roles("own").items()
    }


def test_a_text_that_a_model_takes_in_one_piece_is_several_units_of_evidence(own: Any) -> None:
    """Of about 1,500 tokens without a cut: as one unit it leaves the evidence of less than 2 texts, and no role."""
    long = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split()[:1150])
    n_units = round(len(own.tokenizer.encode(long)) / 512)
    found = heads(own, [*SENTENCES, long])
    assert (found.corpus["n_texts"], found.corpus["n_chunked"]) == (27, 0)
    assert 3 == n_units < found.corpus["effective_texts"] < n_units + 3
    (tally,) = tallies_of(found.sums).values()
    assert tally.n_texts == 26 + n_units
    assert {(head.layer, head.head): names_of(head) for head in found.heads} == {
        place: set(known) for place, known in own_roles("own").items()
    }


def test_units_change_no_value_and_sinks_are_told_of_the_text(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split()[:300])
    whole = heads(own, [text])
    assert whole.corpus["effective_texts"] == 1
    assert "cut long ones into chunks that count apart" in role_notes(whole)[0]
    monkeypatch.setattr(catalogue, "UNIT_QUERIES", 64)
    found = heads(own, [text])
    assert 4 < found.corpus["effective_texts"] <= -(-found.corpus["n_tokens"] // 64)
    ours, theirs = (tallies_of(of.sums)["encoder"] for of in (found, whole))
    assert set(ours.measures.total("c")[..., ours.names.index("sink")].ravel()) == {1.0}
    # float32 adds n numbers within n roundings of their sum: of at most 1 a query, of distances at most n.
    n = found.corpus["n_tokens"]
    slack = np.array([n * n * rounding.unit(torch.float32) * (n if "distance" in name else 1) for name in ours.names])
    for part in ("measures", "uniform"):
        for name in ("s", "c"):
            wanted = getattr(theirs, part).total(name)
            size = np.maximum(1, np.abs(wanted) / n)  # what a query has of norms of values and the like
            over = np.abs(getattr(ours, part).total(name) - wanted) / (slack * size)
            assert over.max() <= 1, (part, name, ours.names[over.max((0, 1)).argmax()])


def test_units_of_chunks_are_told_as_one_text(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two units each: a sink counts once."""
    text = " ".join(SENTENCES[:12])
    options = HeadsOptions(chunk=60)
    whole = heads(own, [text, *SENTENCES[:3]], options)
    monkeypatch.setattr(catalogue, "UNIT_QUERIES", 32)
    found = heads(own, [text, *SENTENCES[:3]], options)
    ours, theirs = (tallies_of(of.sums)["encoder"].measures for of in (found, whole))
    assert ours.n_texts == theirs.n_texts + 2
    sink = tallies_of(found.sums)["encoder"].names.index("sink")
    for name in ("s", "c"):
        np.testing.assert_array_equal(ours.total(name)[..., sink], theirs.total(name)[..., sink])
    assert found.corpus["effective_texts"] > whole.corpus["effective_texts"] + 1


def test_a_control_has_random_weights_on_the_same_texts(own: Any) -> None:
    found = heads(own, SENTENCES[:12], HeadsOptions(control=True, seed=3))
    assert found.run["seed"] == 3
    assert len(found.control) == len(found.heads)
    assert not any(names_of(head) - {"diffuse"} for head in found.control)
    assert any(names_of(head) - {"diffuse"} for head in found.heads)
    again = heads(own, SENTENCES[:12], HeadsOptions(control=True, seed=3))
    require_same(found, again)


def test_frequencies_can_come_from_a_file(own: Any, tmp_path: Path) -> None:
    path = tmp_path / "counts.tsv"
    path.write_text("the\t3\ncat\t1\n", "utf-8")
    given = heads(own, ["the cat"], HeadsOptions(frequencies=path))
    vocabulary = int(own.tokenizer.encode("the cat").ids.max()) + 1  # as far as it is known
    of_words = np.log((np.array([3, 1]) + 1) / (4 + vocabulary))
    to_itself = head_of(given, "L0H2").measures["rarity"]
    assert to_itself.value == pytest.approx(-of_words.sum() / 5, rel=1e-5)  # of five tokens three are special
    assert given.options["frequencies"]["source"] == "counts.tsv"
    counted = heads(own, ["the cat"])
    assert given.corpus["sha256"] == counted.corpus["sha256"]
    assert given.options["frequencies"]["sha256"] != counted.options["frequencies"]["sha256"]


def test_special_tokens_are_not_rare(own: Any) -> None:
    found = heads(own, SENTENCES[:10])
    assert head_of(found, "L0H3").measures["rarity"].value == pytest.approx(0, abs=1e-3)  # it rests on [BOS]


# How the work is split -------------------------------------------------------------------------------------------


def sums_of_texts(found: Findings) -> dict[str, np.ndarray[Any, Any]]:
    """All sums and counts."""
    (tally,) = tallies_of(found.sums).values()
    parts = (tally.measures, tally.uniform, tally.offsets, tally.offsets_uniform, tally.pairs)
    return {f"{number}{name}": part.total(name) for number, part in enumerate(parts) for name in ("s", "c")}


class Dense:
    """A model as if it had nothing but its weights to show: plain attention, and measures of these in float64."""

    def __init__(self, model: Any) -> None:
        self.info = replace(model.info, path="eager")
        self.tokenizer, self.static_embeddings, self._run = model.tokenizer, model.static_embeddings, model.run
        self.blocks, self.writer = model.blocks, None

    def run(self, batch: Any, probe: Any) -> Any:
        from attnscope.core.probes import Weights

        assert isinstance(probe, Weights)
        return self._run(batch, probe)


@pytest.mark.parametrize("spec", ["own", "own-causal", "minilm"])
def test_a_text_has_the_same_sums_whatever_it_is_batched_with(
    spec: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(spec.replace("-", "_"))
    counts = tmp_path / "counts.tsv"  # the corpus's own would differ
    counts.write_text("the\t9\na\t4\n", "utf-8")
    options = HeadsOptions(frequencies=counts)
    texts = SENTENCES[:6]
    together = sums_of_texts(heads(model, texts, options))
    alone = [sums_of_texts(heads(model, [text], options)) for text in texts]
    plain = sums_of_texts(heads(Dense(model), texts, options))  # type: ignore[arg-type]
    found = heads(attnscope.load(spec, dtype="float64"), texts, options)
    exact = sums_of_texts(found)
    (names,) = (tally.names for tally in tallies_of(found.sums).values())
    # A measure adds up over queries what it adds up over keys.
    slack = rounding.adding(2 * max(len(model.tokenizer.encode(text).ids) for text in texts))
    for part, true in exact.items():
        if part.startswith(("2", "3")):  # where the largest weight is, of equal ones, is a matter of rounding
            continue
        size = np.abs(true).max((0, 1)) if part[0] in "01" else None
        if part in ("0s", "1s"):  # what is the difference of two sums is as exact as these
            for ending in ("", "_active"):
                size[names.index(f"signed_distance_tokens{ending}")] = size[names.index(f"distance_tokens{ending}")]
                size[names.index(f"similar_token{ending}")] = exact["0c"].max()
        # Values have no norms where there are but weights.
        has = [not name.startswith(("value_", "norm_")) for name in names] if part[0] in "01" else slice(None)
        for ours in (together[part], sum(one[part] for one in alone)):
            rounding.require_no_worse(
                ours[..., has], plain[part][..., has], true[..., has],
                size=size if size is None else size[has], slack=slack, err_msg=part,
            )  # fmt: skip


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("options", [{}, {"chunk": 12}, {"chunk": 12, "stride": 5}, {"control": True}], ids=str)
def test_shards_merge_into_one_run_bit_for_bit(own: Any, options: dict[str, Any], tmp_path: Path) -> None:
    chosen = HeadsOptions(**options)
    texts = attnscope.Corpus(SAMPLES / "sentences.txt")
    whole = heads(own, texts, chosen)
    parts = [heads(own, texts, replace(chosen, shard=(k, 3))) for k in (1, 2, 3)]
    assert sum(part.corpus["n_texts"] for part in parts) == whole.corpus["n_texts"] == 26
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        require_same(whole, merge_findings([parts[i] for i in order]))
    # Two at a time, and through files.
    half = merge_findings([parts[2], parts[0]])
    assert half.corpus["shards"] == ["1/3", "3/3"]
    assert whole.corpus["complete"] and not half.corpus["complete"] and not half.corpus["interrupted"]
    saved = [attnscope.load_findings(part.save(tmp_path / f"{i}.npz")) for i, part in enumerate((half, parts[1]))]
    require_same(whole, merge_findings(saved))
    assert whole.corpus["n_chunked"] == (
        0 if "chunk" not in options else sum(len(own.tokenizer.encode(t)) > 12 for t in SENTENCES)
    )


def test_shards_of_blocks_of_the_usual_size(tiny_bert: Path) -> None:
    model = attnscope.load(str(tiny_bert))
    chance = np.random.default_rng(0)
    texts = [words(int(chance.integers(1, 9)), chance, ["the", "cat", "a", "b.", "zeta"]) for _ in range(600)]
    whole = heads(model, texts)
    require_same(whole, merge_findings([heads(model, texts, HeadsOptions(shard=(k, 2))) for k in (2, 1)]))
    assert whole.corpus["n_texts"] > 256
    assert whole.corpus["n_texts"] + whole.corpus["n_copies"] == 600


@pytest.mark.usefixtures("small_blocks")
def test_stdin_gives_what_the_file_gives(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SAMPLES / "sentences.txt"

    class Stdin:
        buffer = io.BytesIO(path.read_bytes())

    monkeypatch.setattr("sys.stdin", Stdin())
    piped = heads(own, attnscope.Corpus("-"))
    assert piped.as_json()["heads"] == heads(own, attnscope.Corpus(path)).as_json()["heads"]


@pytest.mark.usefixtures("small_blocks")
def test_merged_parts_keep_what_changes_without_heads(own: Any) -> None:
    """As it was found, by a part that says so; and the problems of all parts, each once."""
    first, second = (heads(own, SENTENCES[:6], HeadsOptions(shard=(number, 2))) for number in (1, 2))
    effects = {"zero_l2": Effect(0.5, 0.25, 0.75, 26.0)}
    told = {"quantity": "l2", "nothing_below": 0.01}
    studied = replace(
        first,
        heads=(replace(first.heads[0], effects=effects), *first.heads[1:]),
        options={**first.options, "causal": told},
        corpus={**first.corpus, "problems": [{"source": "a", "line": 1, "reason": "lost"}]},
    )
    other = replace(second, corpus={**second.corpus, "problems": [{"source": "a", "line": 9, "reason": "lost"}]})
    for parts in ([studied, other], [other, studied]):
        whole = merge_findings(parts)
        assert [bool(head.effects) for head in whole.heads] == [True] + [False] * (len(whole.heads) - 1)
        assert whole.heads[0].effects == effects and whole.options["causal"] == told
        assert [problem["line"] for problem in whole.corpus["problems"]] == [1, 9]
    assert not whole.does_nothing(whole.heads[0])
    assert "causal" not in merge_findings([first, second]).options


def test_a_shard_without_texts_is_no_error_and_merges(own: Any) -> None:
    whole = heads(own, SENTENCES[:10])
    parts = [heads(own, SENTENCES[:10], HeadsOptions(shard=(k, 2))) for k in (1, 2)]
    assert parts[1].heads == ()
    assert "holds no text" in parts[1].run["notes"][-1]
    require_same(whole, merge_findings(parts))
    require_same(whole, merge_findings(parts[::-1]))


def test_each_chunk_of_a_text_is_evidence(own: Any) -> None:
    text = " ".join(SENTENCES[:4])
    found = heads(own, [text, "a cat"], HeadsOptions(chunk=16))
    assert (found.corpus["n_texts"], found.corpus["n_chunked"]) == (2, 1)
    tokens = own.tokenizer.encode(text)
    assert found.corpus["n_tokens"] > len(tokens)  # special tokens come with each chunk
    (tally,) = tallies_of(found.sums).values()
    n_chunks = len(chunks(own.tokenizer.encode(text), chunk=16))
    assert tally.pairs.n_texts == n_chunks + 1
    assert n_chunks - 1 < found.corpus["effective_texts"] < n_chunks + 1
    resting = tally.measures.total("c")[0, 0, tally.names.index("resting")]
    assert resting == found.corpus["n_tokens"]


@pytest.mark.parametrize("stride", [None, 5, 1])
def test_where_chunks_overlap_each_query_counts_once(own: Any, stride: int | None) -> None:
    text = " ".join(SENTENCES[:4])
    tokens = own.tokenizer.encode(text)
    parts = chunks(tokens, chunk=16, stride=stride)
    assert len(parts) > 3
    found = heads(own, [text], HeadsOptions(chunk=16, stride=stride))
    (tally,) = tallies_of(found.sums).values()
    n_special = int(tokens.special.sum())
    expected = len(tokens) + n_special * (len(parts) - 1)  # special tokens come with each chunk
    assert found.corpus["n_tokens"] == expected
    counted = tally.measures.total("c")[..., tally.names.index("resting")]
    np.testing.assert_array_equal(counted, expected)
    # Each ordinary query but the first has a previous token, itself counted once; with the context it is always there.
    previous = tally.measures.total("c")[0, 0, tally.names.index("previous_token")]
    assert previous == expected - len(parts)


def test_texts_may_be_token_numbers(own: Any) -> None:
    numbered = [
        CorpusText(i, "ids", i + 1, ids=tuple(own.tokenizer.encode(text).ids.tolist()))
        for i, text in enumerate(SENTENCES[:12])
    ]
    by_number, by_text = heads(own, numbered), heads(own, SENTENCES[:12])
    assert by_number.corpus["sha256"] != by_text.corpus["sha256"]
    for name in ("previous_token", "cls", "special", "resting", "rarity", "same_token"):
        np.testing.assert_array_equal(by_number.grid("encoder", name), by_text.grid("encoder", name))


def test_a_model_without_tokenizer_reads_token_numbers(tmp_path: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16
    )
    source = tmp_path / "numbers.jsonl"
    source.write_text('{"input_ids": [7, 8, 7, 9]}\n{"input_ids": [3, 4]}\n', "utf-8")
    found = attnscope.heads(attnscope.load(LlamaModel(config)), attnscope.Corpus(source))
    assert found.corpus["n_texts"] == 2
    assert found.corpus["n_tokens"] == 6


def test_models_that_only_have_dense_weights_give_the_same(own: Any) -> None:
    dense, seam = heads(Dense(own), SENTENCES), heads(own, SENTENCES)  # type: ignore[arg-type]
    assert any("dense weights" in note for note in dense.run["notes"])
    assert [names_of(head) for head in dense.heads] == [names_of(head) for head in seam.heads]
    for name in seam.measure_names:
        if name.startswith(("value_weighted", "norm_weighted")):
            assert np.isnan(dense.grid("encoder", name)).all()
        elif name not in ("positional", "rarest_token"):  # of equal weights
            scale = 1e-4 if "distance" in name else 1e-5
            np.testing.assert_allclose(
                dense.grid("encoder", name), seam.grid("encoder", name), atol=scale, rtol=scale, err_msg=name
            )


def test_a_hugging_face_model_on_the_eager_road(tmp_path: Path) -> None:
    write_tiny(tmp_path / "bloom", "bloom", n_head=3, n_layer=2)
    model = attnscope.load(str(tmp_path / "bloom"))
    assert model.info.path == "eager"
    found = heads(model, ["the cat", "a b c d e", "the the cat."] * 4)
    assert len(found.heads) == 6
    assert all(0 <= head.resting_share <= 1 for head in found.heads)


@pytest.mark.parametrize("road", ["seam", "eager"])
def test_an_encoder_decoder_writes_again_what_it_reads(road: str, tmp_path: Path) -> None:
    import torch

    from attnscope.core.measures import TextFacts, measures_of_weights
    from attnscope.core.probes import Weights
    from attnscope.models.model import Batch

    write_tiny(
        tmp_path / "t5", "t5", d_model=15, d_kv=5, num_heads=3, num_layers=2, d_ff=11, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = attnscope.load(str(tmp_path / "t5"))
    texts = ["the cat", "a b c d e", "the the cat."]
    expected: dict[str, list[Any]] = {"encoder": [], "decoder": [], "cross": []}
    for text in texts:
        tokens = model.tokenizer.encode(text)
        ids = torch.from_numpy(tokens.ids)[None]
        target = torch.cat([torch.tensor([[0]]), ids[:, :-1]], 1)
        special = torch.from_numpy(tokens.special)[None]
        of_target = torch.cat([torch.tensor([[True]]), special[:, :-1]], 1)
        probe = Weights()
        model.run(Batch(ids, target_ids=target), probe)
        read = TextFacts(real=ids >= 0, special=special, ids=ids)
        written = TextFacts(real=ids >= 0, special=of_target, ids=target)
        for kind, given in (("encoder", (read,)), ("decoder", (written,)), ("cross", (read, written))):
            expected[kind].append(measures_of_weights(probe.maps[kind][1], *given))  # type: ignore[index]
    if road == "eager":
        object.__setattr__(model.info, "path", "eager")
    found = heads(model, texts)
    assert found.kinds == ("encoder", "decoder", "cross")
    assert any("write it again" in note for note in found.run["notes"])
    for kind, sums in expected.items():
        for name in ("entropy_nats", "first_token", "special", "previous_token", "same_token", "max_weight"):
            i = sums[0].names.index(name)
            total, count = (sum(getattr(one, part)[i].sum(0) for one in sums) for part in ("sum", "count"))
            value = np.divide(total, count, out=np.full(3, np.nan), where=count > 0)
            np.testing.assert_allclose(found.grid(kind, name)[1], value, atol=1e-5, err_msg=f"{kind} {name}")
    across = next(head for head in found.heads if head.kind == "cross")
    assert np.isnan([across.measures[name].value for name in ("previous_token", "induction", "positional")]).all()


# Interruptions ---------------------------------------------------------------------------------------------------


def after(n: int) -> Callable[[Any], None]:
    """What interrupts a study at its n-th report."""
    seen = iter(range(n))

    def report(done: Any) -> None:
        if next(seen, None) is None:
            raise KeyboardInterrupt

    return report


@pytest.mark.usefixtures("small_blocks")
def test_an_interruption_leaves_whole_blocks(own: Any, tmp_path: Path) -> None:
    counts = tmp_path / "counts.tsv"
    counts.write_text("the\t9\n", "utf-8")
    options = HeadsOptions(frequencies=counts)
    found = heads(own, SENTENCES, options, after(2))  # a batch for each block: in the third one
    assert not found.corpus["complete"]
    assert found.corpus["n_texts"] == 8
    expected = heads(own, SENTENCES[:8], options)
    assert found.as_json()["heads"] == expected.as_json()["heads"]
    for name, array in expected.sums.items():
        np.testing.assert_array_equal(found.sums[name], array)


@pytest.mark.usefixtures("small_blocks")
def test_an_interrupted_shard_merges_and_says_so(own: Any) -> None:
    path = attnscope.Corpus(SAMPLES / "sentences.txt")
    cut = heads(own, path, HeadsOptions(shard=(1, 2)), after(1))
    rest = heads(own, path, HeadsOptions(shard=(2, 2)))
    whole = merge_findings([rest, cut])
    assert not whole.corpus["complete"] and cut.corpus["interrupted"] and not rest.corpus["interrupted"]
    assert whole.corpus["n_texts"] == 4 + rest.corpus["n_texts"]


@pytest.mark.parametrize("spec", ["own", "seam"])
def test_an_interruption_in_the_first_block_keeps_what_was_done(
    spec: str, own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spec == "seam":
        sizes = {"d_model": 15, "d_kv": 5, "num_heads": 3, "num_layers": 2, "d_ff": 11}
        write_tiny(tmp_path / "t5", "t5", **sizes, pad_token_id=0, decoder_start_token_id=0)
        own = attnscope.load(str(tmp_path / "t5"))
    monkeypatch.setattr("attnscope.studies.head_blocks.TOKEN_BUDGET", 1)  # a batch for each chunk
    counts = tmp_path / "counts.tsv"
    counts.write_text("the\t9\n", "utf-8")
    options = HeadsOptions(frequencies=counts, chunk=30, stride=20)
    long = " ".join(SENTENCES[:4])
    texts = ["a", long, "the cat", *SENTENCES[:3]]
    assert len(chunks(own.tokenizer.encode(long), chunk=30, stride=20)) > 1
    n_whole = 0
    for n in range(1, 20, 2):
        found = heads(own, texts, options, after(n - 1))
        if found.corpus["complete"]:
            break
        n_texts = found.corpus["n_texts"]
        assert bool(found.heads) == bool(n_texts)
        if 0 < n_texts < 6:
            n_whole += 1
            assert f"these are {n_texts} of its 6" in found.run["notes"][-1]
    assert n_whole > 1


def test_what_an_interruption_keeps_is_what_those_texts_say(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnscope.studies.head_blocks.TOKEN_BUDGET", 30)  # a batch for each text
    counts = tmp_path / "counts.tsv"
    counts.write_text("the\t9\n", "utf-8")
    options = HeadsOptions(frequencies=counts)
    by_length = sorted(SENTENCES[:6], key=lambda text: len(own.tokenizer.encode(text)))
    found = heads(own, SENTENCES[:6], options, after(1))
    n = found.corpus["n_texts"]
    assert 0 < n < 6
    expected = heads(own, by_length[-n:], options)
    assert (found.corpus["n_tokens"], expected.corpus["n_texts"]) == (expected.corpus["n_tokens"], n)
    for name, array in expected.sums.items():
        np.testing.assert_array_equal(found.sums[name], array)


def test_an_interruption_before_any_text_is_done_leaves_a_record_of_nothing(
    own: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnscope.studies.head_blocks.HeadMeasurer._run_batch", interrupted)
    found = heads(own, SENTENCES)
    assert (found.heads, found.corpus["n_texts"], found.corpus["complete"]) == ((), 0, False)


def test_an_interruption_waits_for_what_must_not_be_done_in_part() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), delay_interrupts():
        signal.raise_signal(signal.SIGINT)
        reached.append(1)
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_who_has_ctrl_c_ignored_or_handled_elsewhere_keeps_it_so(
    handler: Any,
) -> None:
    """`nohup attnscope … &` is not to end by a Ctrl-C that is meant for others."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        with delay_interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("small_blocks")
def test_an_interruption_of_the_control_keeps_the_rest(own: Any) -> None:
    found = heads(own, SENTENCES[:12], HeadsOptions(control=True), after(4))
    assert not found.corpus["complete"]
    assert found.corpus["n_texts"] == 12
    assert found.control


# What cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [[], [""], ["  ", "\n"], ""])
def test_without_text_there_is_nothing_to_study(own: Any, texts: Any) -> None:
    with pytest.raises(AttnscopeError, match="no text"):
        heads(own, texts)


def test_one_string_is_one_text(own: Any) -> None:
    assert heads(own, "the cat").corpus["n_texts"] == 1


@pytest.mark.parametrize(
    "options", [{"chunk": 3}, {"chunk": 1000}, {"chunk": 20, "stride": 19}, {"stride": 0}], ids=str
)
def test_chunks_that_cannot_be_are_refused_before_anything_is_read(tiny_bert: Path, options: dict[str, int]) -> None:
    def texts() -> Iterator[str]:
        raise AssertionError("the corpus was read")
        yield ""

    class Unread(attnscope.Corpus):
        __iter__ = texts  # type: ignore[assignment]

    if options == {"chunk": 3}:
        options = {"chunk": 2}  # [CLS] and [SEP] leave no room
    with pytest.raises(AttnscopeError):
        heads(attnscope.load(str(tiny_bert)), Unread(SAMPLES / "alice.txt"), HeadsOptions(**options))


def test_records_that_do_not_belong_together_are_refused_by_name(own: Any, own_causal: Any) -> None:
    first = heads(own, SENTENCES[:10], HeadsOptions(shard=(1, 2)))
    second = HeadsOptions(shard=(2, 2))
    others = {
        "models": heads(own_causal, SENTENCES[:10], second),
        "texts": heads(own, SENTENCES[:11], second),
        "options": heads(own, SENTENCES[:10], replace(second, thresholds={"local": 0.7})),
        "same shard, 1/2": first,
        "overlap": heads(own, SENTENCES[:10], HeadsOptions(shard=(2, 3))),
    }
    for why, other in others.items():
        with pytest.raises(AttnscopeError, match=why) as error:
            merge_findings([first, other], ["one.npz", "other.npz"])
        assert "one.npz" in error.value.message
        assert "other.npz" in error.value.message
    chunked = heads(own, SENTENCES[:10], replace(second, chunk=10))
    with pytest.raises(AttnscopeError, match="options"):
        merge_findings([first, chunked])


def test_damaged_sums_are_refused_by_name(own: Any) -> None:
    parts = [heads(own, SENTENCES[:10], HeadsOptions(shard=(k, 2))) for k in (1, 2)]
    sums = dict(parts[0].sums)
    sums["encoder.measures.limbs"] = sums["encoder.measures.limbs"][..., :-1]
    broken = replace(parts[0], sums=sums)
    with pytest.raises(AttnscopeError, match=r"bad\.npz"):
        merge_findings([broken, heads(own, SENTENCES[:10], HeadsOptions(shard=(2, 2)))], ["bad.npz", "good.npz"])
    del sums["encoder.measures.limbs"]
    with pytest.raises(AttnscopeError, match=r"bad\.npz"):
        merge_findings([parts[1], broken], ["good.npz", "bad.npz"])


# Memory ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_corpus(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "BLOCK", 20)
    monkeypatch.setattr("attnscope.core.mapped_arrays.SMALLEST", 2**60)  # so that it is all counted
    model = attnscope.load(str(tiny_bert))

    # Of files alike: one of them may be in memory up to 64 KiB.
    files = [tmp_path / f"{number}.txt" for number in range(30)]
    for path in files:
        lines = (f"the cat a b w{path.stem}x{i}.\na b c d e f w{path.stem}x{i}.\n" for i in range(10))
        path.write_text("".join(lines), "utf-8")  # no copies

    class Collecting(attnscope.Corpus):
        """Python keeps up to 2,000 freed tuples of each length for later, and counts them, until it collects."""

        def __iter__(self) -> Iterator[CorpusText]:
            for number, text in enumerate(super().__iter__()):
                if number % 20 == 0:
                    gc.collect()
                yield text

    def peak(n: int) -> int:
        tracemalloc.start()
        heads(model, Collecting(files[: n // 20]))
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    gc.freeze()  # what other tests hold would make each collection take seconds
    try:
        peak(60)  # whatever is kept from then on
        assert peak(600) < 1.05 * peak(60)
    finally:
        gc.unfreeze()


RESIDENT = """
import resource, sys
import attnscope, torch
torch.set_num_threads(1)
attnscope.heads(attnscope.load("minilm"), attnscope.Corpus(sys.argv[1]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("n", "length"), [(300, 20), (25, 330)], ids=["short", "long"])
def test_what_a_process_holds_does_not_grow_with_the_corpus(n: int, length: int, tmp_path: Path) -> None:
    story, chance = (SAMPLES / "alice.txt").read_text("utf-8").split(), np.random.default_rng(0)

    def peak(n: int) -> int:
        path = tmp_path / f"{n}.txt"
        starts = chance.integers(0, len(story) - 2 * length, n)
        stops = starts + chance.integers(length // 2, length * 3 // 2, n)
        path.write_text("\n".join(" ".join(story[a:b]) for a, b in zip(starts, stops, strict=True)), "utf-8")
        return int(python("-c", RESIDENT, path, check=True, timeout=1000).stdout)

    assert peak(10 * n) < 1.05 * peak(n)


def test_offsets_of_both_sides_agree() -> None:
    from attnscope.core import measures

    assert measures.OFFSETS == OFFSETS
