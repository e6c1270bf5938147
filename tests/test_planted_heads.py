"""What measures and roles say of heads that were made to do one thing: each says that, and nothing else."""

import numpy as np
import pytest
import torch

import attnscope
from attnscope.core.facts import TextFacts
from attnscope.core.measures import measures_of_weights
from attnscope.corpus import CorpusText
from attnscope.studies.heads.measuring import OFFSETS, PAIR_MEASURES, KindSums
from attnscope.studies.heads.roles import complete_thresholds
from attnscope.studies.heads.roles import judge as judge_tallies
from attnscope.studies.heads.study import heads
from benchmarks.known.families import Scores, build, writer_of_the_token_before
from tests.heads_helpers import heads_in


def text_of(ids, **facts):
    """One text without special tokens."""
    real = torch.ones(1, len(ids), dtype=torch.bool)
    return TextFacts(real=real, special=torch.zeros_like(real), ids=torch.tensor([list(ids)]), **facts)


def causal(n):
    """Which key each of n queries may attend to."""
    return torch.ones(n, n, dtype=torch.bool).tril()


def tally_of_texts(sums):
    """One layer's measures of some texts, as a study adds them up."""
    tally = KindSums.empty("decoder", (0,), sums[0].sum.shape[2], sums[0].names)
    for one in sums:
        of = {
            name: np.moveaxis(getattr(one, name), 0, -1)[:, None]
            for name in ("sum", "count", "uniform_sum")
        }
        tally.measures.add(of["sum"], of["count"])
        tally.uniform.add(of["uniform_sum"], of["count"])
    nothing = np.zeros((len(sums), len(PAIR_MEASURES), len(OFFSETS)))
    tally.pairs.add(nothing, nothing)
    return tally


def judge(weights, facts, **options):
    """The one head whose weights on some texts these are, (query, key) each."""
    sums = [
        measures_of_weights(a[None, None], text, **options)
        for a, text in zip(weights, facts, strict=True)
    ]
    (head,) = heads_in(judge_tallies([tally_of_texts(sums)], complete_thresholds({}), len(sums)))
    return head


def roles_of(head):
    return {role.name for role in head.roles}


def test_a_head_that_spreads_over_what_is_left_is_not_local():
    """It leaves the first token only where few others are to be seen: near the beginning, where all keys are near."""
    weights = []
    for n in range(20, 45):
        left = torch.tensor([0.0, *(0.9 if q < 6 else 0.05 for q in range(1, n))], dtype=torch.float64)
        rows = causal(n).double()
        rows[:, 0] = 0
        rows = rows / rows.sum(-1, keepdim=True).clamp(min=1) * left[:, None]
        rows[:, 0] = 1 - left
        weights.append(rows)
    head = judge(weights, [text_of(range(len(rows))) for rows in weights])
    found = head.measures["window_active"]
    assert found.value > 0.7
    assert found.baseline == pytest.approx(found.value)
    assert roles_of(head) == {"first_token"}


@pytest.mark.parametrize("window", [4, None])
def test_a_window_of_a_few_tokens_makes_no_sink(window):
    weights = []
    hidden = []
    for n in range(20, 45):
        may = causal(n) if window is None else causal(n).triu(1 - window)
        rows = torch.where(may.any(-1, keepdim=True), may.double() / may.sum(-1, keepdim=True), 0)
        sees = may[:, 0]
        rows[sees] = 0
        rows[sees, 0] = 1
        weights.append(rows)
        hidden.append(may)
    sums = [
        measures_of_weights(rows[None, None], text_of(range(len(rows))), allowed=may)
        for rows, may in zip(weights, hidden, strict=True)
    ]
    (head,) = heads_in(judge_tallies([tally_of_texts(sums)], complete_thresholds({}), len(sums)))
    # Of the queries that may see it all look at it; but those are four.
    assert head.measures["first_token"].value == 1
    assert roles_of(head) >= {"first_token"} if window is None else "first_token" not in roles_of(head)


def test_the_first_token_is_never_the_rarest(monkeypatch):
    """Where there is no [CLS] it is a sink, whatever it is; and tokens that are equally rare are so together."""
    from attnscope.core.measures import HeadMeasures

    seen = []
    made = HeadMeasures.__init__

    def see(self, facts, *more, **options):
        seen.append(facts)
        made(self, facts, *more, **options)

    monkeypatch.setattr(HeadMeasures, "__init__", see)
    heads(planted_llama(), [CorpusText(1, "ids", 1, ids=(9, 1, 2, 3, 1, 4))])
    (facts,) = seen
    assert facts.rarest is not None
    assert facts.rarest.tolist() == [[False, False, True, True, False, True]]


VOCABULARY = 40
LONGEST = 48
SINK = 7.0
MATCH = 6.2
"""Scores of the first token, and of what followed the query's token before; all other keys have 0."""


def planted_llama():
    """A Llama of two layers: its first looks at the token before, the heads of its second rest or repeat."""
    nothing = np.zeros((VOCABULARY, VOCABULARY))
    nowhere = np.zeros(2 * LONGEST - 1)
    rests = nothing.copy()
    rests[:, 0] = SINK
    repeats = Scores(rests, MATCH * np.eye(VOCABULARY), nowhere)
    previous = writer_of_the_token_before(VOCABULARY, LONGEST)
    layers = [[previous, Scores(nothing, nothing, nowhere)], [repeats, repeats]]
    return attnscope.load(build("llama", [str(n) for n in range(VOCABULARY)], layers, LONGEST))


def repeating_texts(n, seed=0):
    """Texts of 36 different tokens but for three, that come again with what followed them."""
    chance = np.random.default_rng(seed)
    texts = []
    for index in range(n):
        ids = [0, *(1 + chance.permutation(VOCABULARY - 1))[:35].tolist()]
        for at in (4, 9, 15):
            ids[at + 18] = ids[at]
        texts.append(CorpusText(index, "ids", index + 1, ids=tuple(ids)))
    return texts


def test_induction_heads_that_rest_nearly_always_are_named():
    found = heads(planted_llama(), repeating_texts(30))
    by_name = {head.name: head for head in heads_in(found)}
    assert by_name["L0H0"].measures["previous_token"].value > 0.95
    for name in ("L1H0", "L1H1"):
        head = by_name[name]
        assert head.resting_share > 0.9
        assert head.measures["induction"].value < 0.4
        role = next(role for role in head.roles if role.name == "induction")
        assert role.measure == "induction_active"
        assert role.value > 0.8
        # Of its own queries, which are few: over all of them it is less than a tenth.
        assert role.active_share > 0.2 > 1 - head.resting_share
        assert "rare" not in roles_of(head)
