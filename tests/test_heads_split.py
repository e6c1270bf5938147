"""The study of heads gives the same however its work is split: batches, blocks, chunks, and kinds of models."""

from dataclasses import replace

import numpy as np
import pytest

import attnscope
from attnscope.core.catalogue import measure_names
from attnscope.corpus import chunks
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.heads.study import heads
from tests import rounding
from tests.conftest import SENTENCES, write_tiny_t5
from tests.heads_helpers import fix_counts, heads_in, names_of, small_blocks, study_tallies

__all__ = ["small_blocks"]


def sums_of_texts(model, texts):
    """All sums and counts."""
    (tally,) = study_tallies(model, texts)[1].values()
    parts = (tally.measures, tally.uniform, tally.pairs)
    return {
        f"{number}{name}": part.total(name) for number, part in enumerate(parts) for name in ("s", "c")
    }


class Dense:
    """A model as if it had nothing but its weights to show: plain attention, and measures of these in float64."""

    def __init__(self, model):
        self.info = replace(model.info, path="eager")
        self.tokenizer, self.static_embeddings, self._run = (
            model.tokenizer,
            model.static_embeddings,
            model.run,
        )
        self.blocks, self.text_generator = model.blocks, None

    def run(self, batch, probe):
        from attnscope.core.attention.probes import WeightsRecorder

        assert isinstance(probe, WeightsRecorder)
        return self._run(batch, probe)


@pytest.mark.parametrize("spec", ["own", "own-causal", "minilm"])
def test_a_text_has_the_same_sums_whatever_it_is_batched_with(spec, monkeypatch, request):
    model = request.getfixturevalue(spec.replace("-", "_"))
    fix_counts(monkeypatch, model, "the the the a a")  # those of some of the texts would differ
    texts = SENTENCES[:6]
    together = sums_of_texts(model, texts)
    alone = [sums_of_texts(model, [text]) for text in texts]
    plain = sums_of_texts(Dense(model), texts)
    exact = sums_of_texts(attnscope.load(spec, dtype="float64"), texts)
    names = measure_names()
    # A measure adds up over queries what it adds up over keys.
    slack = rounding.adding(2 * max(len(model.tokenizer.encode(text).ids) for text in texts))
    for part, true in exact.items():
        # Where the largest weight is, of equal ones, is a matter of rounding.
        if part.startswith(("2", "3")):
            continue
        size = np.abs(true).max((0, 1)) if part[0] in "01" else None
        if part in ("0s", "1s"):  # what is the difference of two sums is as exact as these
            for ending in ("", "_active"):
                size[names.index(f"signed_distance_tokens{ending}")] = size[
                    names.index(f"distance_tokens{ending}")
                ]
                size[names.index(f"similar_token{ending}")] = exact["0c"].max()
        # Values have no norms where there are but weights.
        has = (
            [not name.startswith(("value_", "norm_")) for name in names]
            if part[0] in "01"
            else slice(None)
        )
        for ours in (together[part], sum(one[part] for one in alone)):
            rounding.require_no_worse(
                ours[..., has],
                plain[part][..., has],
                true[..., has],
                size=size if size is None else size[has],
                slack=slack,
                err_msg=part,
            )


def test_each_chunk_of_a_text_is_evidence(own):
    text = " ".join(SENTENCES[:4])
    found, tallies = study_tallies(own, [text, "a cat"], HeadsOptions(chunk=16))
    assert found.corpus["n_texts"] == 2
    assert found.corpus["n_chunked"] == 1
    tokens = own.tokenizer.encode(text)
    assert found.corpus["n_tokens"] > len(tokens)  # special tokens come with each chunk
    (tally,) = tallies.values()
    n_chunks = len(chunks(own.tokenizer.encode(text), chunk=16))
    assert tally.pairs.n_texts == n_chunks + 1
    assert 2 < found.corpus["effective_texts"] < n_chunks + 1
    resting = tally.measures.total("c")[0, 0, tally.names.index("resting")]
    assert resting == pytest.approx(2)


@pytest.mark.parametrize("stride", [None, 5, 1])
def test_where_chunks_overlap_each_query_counts_once(own, stride):
    text = " ".join(SENTENCES[:4])
    tokens = own.tokenizer.encode(text)
    parts = chunks(tokens, chunk=16, stride=stride)
    assert len(parts) > 3
    found, tallies = study_tallies(own, [text], HeadsOptions(chunk=16, stride=stride))
    (tally,) = tallies.values()
    n_special = int(tokens.special.sum())
    expected = len(tokens) + n_special * (len(parts) - 1)  # special tokens come with each chunk
    assert found.corpus["n_tokens"] == expected
    counts = tally.measures.total("c") * tally.queries_per_count
    np.testing.assert_allclose(counts[..., tally.names.index("resting")], expected)
    # Each ordinary query but the first has a previous token, itself counted once; with the context it is always there.
    assert counts[0, 0, tally.names.index("previous_token")] == pytest.approx(expected - len(parts))


def test_models_that_only_have_dense_weights_give_the_same(own):
    dense, seam = heads(Dense(own), SENTENCES), heads(own, SENTENCES)
    assert any("dense weights" in note for note in dense.run["notes"])
    assert [names_of(head) for head in heads_in(dense)] == [names_of(head) for head in heads_in(seam)]
    for name in seam.measure_names:
        if name != "rarest_token":  # of equal weights
            scale = 1e-4 if "distance" in name else 1e-5
            np.testing.assert_allclose(
                dense["heads"].grid(name, "encoder"),
                seam["heads"].grid(name, "encoder"),
                atol=scale,
                rtol=scale,
                err_msg=name,
            )


@pytest.mark.parametrize("road", ["seam", "eager"])
def test_an_encoder_decoder_writes_again_what_it_reads(road, tmp_path):
    import torch

    from attnscope.core.attention.probes import WeightsRecorder
    from attnscope.core.facts import TextFacts
    from attnscope.core.measures import measures_of_weights
    from attnscope.models.model import Batch

    write_tiny_t5(tmp_path / "t5")
    model = attnscope.load(str(tmp_path / "t5"))
    texts = ["the cat", "a b c d e", "the the cat."]
    # What dense weights say of each text, which the decoder reads one token later.
    expected = {"encoder": [], "decoder": [], "cross": []}
    for text in texts:
        tokens = model.tokenizer.encode(text)
        ids = torch.from_numpy(tokens.ids)[None]
        target = torch.cat([torch.tensor([[0]]), ids[:, :-1]], 1)
        special = torch.from_numpy(tokens.special)[None]
        of_target = torch.cat([torch.tensor([[True]]), special[:, :-1]], 1)
        probe = WeightsRecorder()
        model.run(Batch(ids, target_ids=target), probe)
        read = TextFacts(real=ids >= 0, special=special, ids=ids)
        written = TextFacts(real=ids >= 0, special=of_target, ids=target)
        for kind, given in (("encoder", (read,)), ("decoder", (written,)), ("cross", (read, written))):
            expected[kind].append(measures_of_weights(probe.maps[kind][1], *given))
    if road == "eager":
        object.__setattr__(model.info, "path", "eager")
    found = heads(model, texts)
    sizes = [len(model.tokenizer.encode(text)) for text in texts]
    assert found.kinds == ("encoder", "decoder", "cross")
    assert any("write it again" in note for note in found.run["notes"])
    # Texts weigh the same, however long they are.
    for kind, sums in expected.items():
        for name in ("entropy_nats", "first_token", "special", "previous_token", "same_token"):
            i = sums[0].names.index(name)
            total = sum((one.sum[i].sum(0) / size for one, size in zip(sums, sizes, strict=True)))
            count = sum((one.count[i].sum(0) / size for one, size in zip(sums, sizes, strict=True)))
            value = np.divide(total, count, out=np.full(3, np.nan), where=count > 0)
            np.testing.assert_allclose(
                found["heads"].grid(name, kind)[1], value, atol=1e-5, err_msg=f"{kind} {name}"
            )
    # Across, a query has no token before it.
    across = next(head for head in heads_in(found) if head.kind == "cross")
    assert np.isnan([across.measures[name].value for name in ("previous_token", "induction")]).all()
