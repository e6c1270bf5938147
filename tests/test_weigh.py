"""What weighs the same in measures and roles: texts, or queries."""

from typing import Any

import numpy as np
import pytest

from attnscope.errors import AttnscopeError, UsageError
from attnscope.records.heads.findings import Findings
from attnscope.studies.heads.merging import merge_findings
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.heads.study import heads
from attnscope.studies.measuring.tally import tallies_of
from attnscope.views.tables.wording import corpus_notes
from tests.conftest import SAMPLES, SENTENCES

LONG = " ".join((SAMPLES / "alice.txt").read_text("utf-8").split()[:300])
QUERIES = HeadsOptions(weigh="queries")


def value(found: Findings, name: str, field: str = "value") -> np.ndarray[Any, Any]:
    heads_of = {(head.layer, head.head): getattr(head.measures[name], field) for head in found.heads}
    return np.array([heads_of[place] for place in sorted(heads_of)]).reshape(found.grid("encoder", name).shape)


def test_a_text_weighs_the_same_however_long_it_is(own: Any) -> None:
    texts = [*SENTENCES[:4], LONG]
    together, by_query = heads(own, texts), heads(own, texts, QUERIES)
    alone = [heads(own, [text]) for text in texts]
    sizes = np.array([found.corpus["n_tokens"] for found in alone], float)[:, None, None]
    for name in ("entropy_nats", "special", "induction", "relative_entropy"):
        values = np.stack([value(found, name) for found in alone])
        counts = np.stack([value(found, name, "count") for found in alone])  # for how many queries it is defined
        for found, weights in ((together, counts / sizes), (by_query, counts)):
            expected = (np.nan_to_num(values) * weights).sum(0) / weights.sum(0)
            np.testing.assert_allclose(value(found, name), expected, atol=1e-6, err_msg=name)
    assert together.corpus["effective_texts"] == pytest.approx(5, abs=0.01)
    assert by_query.corpus["effective_texts"] < 2


def test_chunks_of_a_text_share_its_weight(own: Any) -> None:
    found = heads(own, [*SENTENCES[:4], LONG], HeadsOptions(chunk=40))
    (tally,) = tallies_of(found.sums).values()
    counts = tally.measures.total("c")[0, 0]
    assert counts[tally.names.index("resting")] == pytest.approx(5, abs=1e-6)
    assert counts[tally.names.index("sink")] == 5
    assert tally.lengths.n_texts == 5


def test_texts_of_one_length_weigh_the_same_either_way(own: Any) -> None:
    words = ["the", "cat", "saw", "a", "dog", "on", "my", "mat"]
    texts = [" ".join(words[i:] + words[:i]) for i in range(8)]
    alike, by_query = heads(own, texts), heads(own, texts, QUERIES)
    assert len({len(own.tokenizer.encode(text)) for text in texts}) == 1
    for one, other in zip(alike.heads, by_query.heads, strict=True):
        assert [role.name for role in one.roles] == [role.name for role in other.roles]
        for name, estimate in one.measures.items():
            np.testing.assert_allclose(
                list(vars(estimate).values()), list(vars(other.measures[name]).values()), rtol=1e-5, atol=1e-6,
                err_msg=name,
            )  # fmt: skip


def test_a_long_text_takes_no_roles_from_short_ones(own: Any) -> None:
    short, mixed = heads(own, SENTENCES), heads(own, [*SENTENCES, " ".join([LONG] * 3)])
    for one, other in zip(short.heads, mixed.heads, strict=True):
        assert {role.name for role in one.roles} == {role.name for role in other.roles}, one.name


def test_a_text_that_outweighs_the_others_is_named(own: Any) -> None:
    (line,) = corpus_notes(heads(own, [*SENTENCES[:4], LONG], QUERIES))
    assert "line 5) carries" in line and "--weigh texts" in line
    assert not corpus_notes(heads(own, [*SENTENCES[:4], LONG]))
    assert not corpus_notes(heads(own, SENTENCES[:12], QUERIES))
    assert corpus_notes(heads(own, SENTENCES[:2])) == [
        "each of the 2 texts carries 50% of the weight of measures and roles"
    ]


def test_parts_of_different_weighing_are_not_merged(own: Any) -> None:
    first = heads(own, SENTENCES, HeadsOptions(shard=(1, 2)))
    second = heads(own, SENTENCES, HeadsOptions(shard=(2, 2), weigh="queries"))
    with pytest.raises(AttnscopeError, match="different weighings, --weigh"):
        merge_findings([first, second])
    with pytest.raises(UsageError, match="choose texts or queries"):
        heads(own, SENTENCES, HeadsOptions(weigh="tokens"))  # type: ignore[arg-type]
