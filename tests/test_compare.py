"""Heads compared over texts, side by side, on minimal pairs and between models; and records of that."""

import csv
import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

import attnscope
from attnscope.errors import AttnscopeError, UsageError
from attnscope.questions.distances import describe_texts
from attnscope.studies.compare.options import CompareOptions
from attnscope.studies.compare.study import compare, compare_models
from attnscope.studies.compare.texts import align, compare_heads, compare_texts
from tests.conftest import write_tiny
from tests.heads_helpers import after
from tests.record_helpers import require_lossless, require_read, tokens_of
from tests.rounding import unit

TIRED = "The animal didn't cross the street because it was too tired."
WIDE = "The animal didn't cross the street because it was too wide."
TEXTS = ["the cat sat.", "a cat, the cat and the mat that sat", "b", "the the the the"]
MEASURES = ("hellinger", "jensen_shannon")
HIDING = CompareOptions(hide_special=True)
KEPT = 4 * unit(torch.float32)
"""What a divergence may move where weights are kept in float32: two rows by u of their sum, which counts twice."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """In float64, so that what differs by rounding is told from what differs."""
    return attnscope.load(
        str(write_tiny(tmp_path_factory.mktemp("tiny") / "one")), engine="native", dtype="float64"
    )


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "two"
    return attnscope.load(
        str(write_tiny(folder, seed=1, num_hidden_layers=3, num_attention_heads=5)),
        engine="native",
        dtype="float64",
    )


def means(found):
    """The mean divergences of all pairs of heads: squared distances."""
    return found.distance() ** 2


def places(found, table="heads"):
    """Layer and number of each head."""
    heads = found.table(table)
    return list(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))


def mean_by_hand(model, texts, a, b, measure, special):
    """The mean divergence of two heads, row by row, from the records of `heatmap`."""
    total = 0.0
    count = 0
    for text in texts:
        record = attnscope.heatmap(model, text)
        record = record if special else record.hide_special()
        for p, q in zip(record.of(*a).astype(float), record.of(*b).astype(float), strict=True):
            if not p.any() or not q.any():
                continue
            count += 1
            if measure == "hellinger":
                total += ((np.sqrt(p) - np.sqrt(q)) ** 2).sum() / 2
            else:
                m = (p + q) / 2
                total += sum(
                    (x[i] * math.log(x[i] / m[i])) / 2 for x in (p, q) for i in range(len(p)) if x[i] > 0
                )
    return total / count


class TestAllHeads:
    def test_copies_of_a_text_count_once(self, tiny):
        once = compare(tiny, TEXTS)
        often = compare(tiny, [*TEXTS, TEXTS[0].upper(), *TEXTS])
        assert once.grids.keys() == often.grids.keys()
        for name, values in once.grids.items():
            np.testing.assert_array_equal(values, often.grids[name])
        assert often.corpus["n_copies"] == len(TEXTS) + 1
        said = [describe_texts(often), *often.report().problems]
        assert sum("left out" in line for line in said) == 1

    @pytest.mark.parametrize(("measure", "hides"), [*product(MEASURES, (False, True))])
    def test_means_are_those_of_rows_one_by_one(self, tiny, measure, hides):
        found = compare(tiny, TEXTS, CompareOptions(measure, hide_special=hides))
        heads = places(found)
        for a, b in product(range(6), repeat=2):
            wanted = mean_by_hand(tiny, TEXTS, heads[a], heads[b], measure, not hides)
            assert means(found)[a, b] == pytest.approx(wanted, abs=KEPT), (a, b)

    def test_batches_and_padding_do_not_matter(self, tiny, monkeypatch):
        together = compare(tiny, TEXTS)
        monkeypatch.setattr("attnscope.studies.compare.study.TOKEN_BUDGET", 1)
        monkeypatch.setattr("attnscope.studies.compare.study.WEIGHTS_AT_ONCE", 1)
        apart = compare(tiny, TEXTS)
        np.testing.assert_allclose(means(together), means(apart), atol=1e-12)
        np.testing.assert_array_equal(
            together["distance_count:hellinger"], apart["distance_count:hellinger"]
        )

    def test_texts_over_the_limit_are_cut_and_count_as_one_text(self, tiny):
        found = compare(tiny, ["the cat " * 40, "a cat"])
        assert found.corpus["n_texts"] == 2
        assert found.corpus["n_chunked"] == 1
        assert found["distance_count:hellinger"][0, 1] == found.corpus["n_tokens"]

    def test_intervals_and_counts(self, tiny):
        found = compare(tiny, TEXTS)
        above = np.triu_indices(6, 1)
        low, high = (found[f"distance_{part}:hellinger"] for part in ("low", "high"))
        assert (low[above] <= found.distance()[above]).all()
        assert (found.distance()[above] <= high[above]).all()
        assert (low >= 0).all()
        for few in (found, compare(tiny, TEXTS[:2])):  # t of one degree of freedom reaches far
            assert (few["distance_high:hellinger"] <= 1).all()
        assert not found.distance().diagonal().any()
        one = compare(tiny, TEXTS[0])
        assert np.isnan(one["distance_low:hellinger"]).all()
        assert one.corpus["text"] == TEXTS[0]

    def test_the_dense_road_gives_the_same(self, tiny, monkeypatch):
        by_calls = compare(tiny, TEXTS)
        from dataclasses import replace

        monkeypatch.setattr(tiny, "info", replace(tiny.info, path="eager"))
        np.testing.assert_allclose(means(by_calls), means(compare(tiny, TEXTS)), atol=KEPT)

    def test_the_first_token_of_a_decoder_is_hidden_with_special_ones(self):
        model = attnscope.load("own-causal", dtype="float64")
        found = compare(model, TEXTS[:2], HIDING)
        heads = places(found)
        by_hand = mean_by_hand(model, TEXTS[:2], *heads[:2], "hellinger", False)
        assert means(found)[0, 1] == pytest.approx(by_hand, rel=1e-5)
        picked = compare_heads(model, TEXTS[0], heads[:2], HIDING)
        hidden = attnscope.heatmap(model, TEXTS[0], hide_special=True)
        np.testing.assert_allclose(picked["weights:first"][1], hidden.of(*heads[1]), atol=1e-6)

    def test_an_interruption_keeps_whole_texts(self, tiny, monkeypatch):
        monkeypatch.setattr("attnscope.studies.compare.study.TOKEN_BUDGET", 1)
        found = compare(tiny, TEXTS, report=after(0))
        assert found.corpus["n_texts"] == 1
        assert found.corpus["complete"] is False
        np.testing.assert_allclose(means(found), means(compare(tiny, TEXTS[1])), atol=1e-12)

    @pytest.mark.parametrize("texts", [[], [" "]])
    def test_no_text_is_said(self, tiny, texts):
        with pytest.raises(AttnscopeError, match="no text"):
            compare(tiny, texts)


class TestModels:
    def test_distances_are_those_between_rows(self, tiny, other):
        found = compare_models(tiny, other, TEXTS[1])
        assert found.distance().shape == (6, 15)
        ours = attnscope.heatmap(tiny, TEXTS[1])
        theirs = attnscope.heatmap(other, TEXTS[1])
        p = ours.of(1, 2).astype(float)
        q = theirs.of(2, 4).astype(float)
        wanted = ((np.sqrt(p) - np.sqrt(q)) ** 2).sum(-1).mean() / 2
        assert means(found)[5, 14] == pytest.approx(wanted, abs=KEPT)
        assert (found["match:hellinger"] >= 0).sum() == 6
        assert len(found.same_heads()) == 6

    def test_permuted_heads_are_found_again(self, tiny, tmp_path):
        import copy

        swapped = copy.deepcopy(tiny)
        layer = swapped._network.layers[0].attention
        with torch.no_grad():
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
                order = torch.tensor([2, 0, 1])
                for parameter in (projection.weight, projection.bias):
                    parts = parameter.view(3, 5, -1)[order].reshape(parameter.shape)
                    parameter.copy_(parts)
            layer.out_proj.weight.copy_(layer.out_proj.weight.view(15, 3, 5)[:, order].reshape(15, 15))
        # The heads of the first layer have gone round by one.
        found = compare_models(tiny, swapped, TEXTS)
        others = places(found, "other_heads")
        matched = dict(
            zip(places(found), [others[row] for row in found["match:hellinger"]], strict=True)
        )
        assert [matched[0, h] for h in range(3)] == [(0, 1), (0, 2), (0, 0)]
        assert [matched[1, h] for h in range(3)] == [(1, 0), (1, 1), (1, 2)]
        assert found.moved().sum() == 3

    def test_other_tokens_of_a_text_are_refused(self, tiny, minilm):
        with pytest.raises(
            AttnscopeError, match="split the same text into different tokens: .* … and .* …"
        ) as caught:
            compare_models(tiny, minilm, TEXTS)
        assert "share a tokenizer" in str(caught.value.hint)


def panels_of(found, figure):
    """The maps side by side of a figure."""
    (block,) = found.report().blocks_by_figure()[figure]
    return list(block.view.panels)


class TestPickedHeads:
    def test_the_mean_and_the_single_head(self, minilm):
        found = compare_heads(minilm, TIRED, [(3, h) for h in range(12)])
        np.testing.assert_allclose(found["mean:first"], found["weights:first"].mean(0), atol=1e-6)
        assert "one head of full width" in found.options["single_note"]
        np.testing.assert_allclose(found["single:first"].sum(-1), 1, atol=1e-5)
        assert np.abs(found["single:first"] - found["mean:first"]).max() > 0.5

    def test_differences(self, tiny):
        two = compare_heads(tiny, "the cat", [(0, 0), (1, 1)])
        difference, single = panels_of(two, "differences")
        assert difference.title == "L0H0 − L1H1"
        assert single.title == "single head − mean"
        weights = two["weights:first"]
        np.testing.assert_array_equal(difference.values, weights[0] - weights[1])

    @pytest.mark.parametrize("pick", [[], [(0, 0)], [(0, 0), (0, 0)]])
    def test_fewer_than_two_heads_are_refused(self, tiny, pick):
        with pytest.raises(UsageError, match="nothing to compare"):
            compare_heads(tiny, "the cat", pick)


class TestMinimalPairs:
    def test_change_is_the_root_of_the_mean_divergence(self, minilm):
        found = compare_texts(minilm, TIRED, WIDE, query="it")
        head = found.head_names.index("L3H1")
        p, q = (found[f"weights:{side}"][head].astype(float) for side in ("first", "second"))
        h2 = ((np.sqrt(p) - np.sqrt(q)) ** 2).sum(-1) / 2
        equal = [i for i in range(16) if i != 13]
        assert found["heads"]["hellinger_overall"][head] == pytest.approx(
            math.sqrt(h2[equal].mean()), abs=1e-9
        )
        assert found["heads"]["hellinger_at_query"][head] == pytest.approx(math.sqrt(h2[10]), abs=1e-9)

    def test_a_query_of_one_text_alone_is_refused(self, tiny):
        with pytest.raises(AttnscopeError, match="one of the texts alone"):
            compare_texts(tiny, "the cat", "the cat a b", query="b")
        with pytest.raises(AttnscopeError, match="no token is 'dog'"):
            compare_texts(tiny, "the cat", "the cat a", query="dog")


class TestAlignment:
    @staticmethod
    def of(first, second):
        aligned, equal, lengths = align(tokens_of(first.split()), tokens_of(second.split()))
        keys = zip(np.cumsum(lengths, 0).tolist(), lengths.tolist(), strict=True)
        return (
            aligned.tolist(),
            equal.tolist(),
            [([*range(a - m, a)], [*range(b - n, b)]) for (a, b), (m, n) in keys],
        )

    def test_as_few_edits_as_can_be(self):
        """Against a plain recursion, on all pairs of short texts of three words."""

        @cache
        def least(a, b):
            if not a or not b:
                return len(a) + len(b)
            return min(least(a[1:], b[1:]) + (a[0] != b[0]), least(a[1:], b) + 1, least(a, b[1:]) + 1)

        texts = ["".join(letters) for n in range(1, 5) for letters in product("xyz", repeat=n)]
        for first, second in product(texts, repeat=2):
            _, _, keys = self.of(" ".join(first), " ".join(second))
            assert sorted(sum((a for a, _ in keys), [])) == list(range(len(first)))
            assert sorted(sum((b for _, b in keys), [])) == list(range(len(second)))
            edits = sum(
                max(len(a), len(b)) for a, b in keys if [first[i] for i in a] != [second[i] for i in b]
            )
            assert edits == least(first, second), (first, second)


@pytest.fixture(params=["heads", "pick", "texts", "models"])
def record(request, tiny, other):
    made = {
        "heads": lambda: compare(tiny, TEXTS),
        "pick": lambda: compare_heads(tiny, "the cat", [(0, 0), (1, 1)], HIDING),
        "texts": lambda: compare_texts(tiny, "the cat, a", "the cat a b", query="a"),
        "models": lambda: compare_models(tiny, other, TEXTS),
    }
    return made[request.param]()


def test_a_record_comes_back_without_loss(record, tmp_path):
    require_lossless(record, tmp_path)
    rows = list(csv.reader(record.to_csv().splitlines()))
    assert len({len(row) for row in rows}) == 1
    assert len(rows) > 1
    arrays = record.arrays()
    for name in [
        name for name, array in arrays.items() if array.shape[0] > 1 and not name.startswith("merges")
    ]:
        cut = arrays | {name: arrays[name][:1]}
        with pytest.raises((AttnscopeError, ValueError)):
            require_read(type(record), record.describe(), cut)
