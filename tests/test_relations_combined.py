"""Heads together: undirected links counted by hand, combinations against plain loops, planted and random contacts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.patches import Circle
from matplotlib.text import Text
from scipy.special import stdtrit

import attnscope
from attnscope.annotated import AnnotatedText, Link
from attnscope.annotated.spans import parse
from attnscope.annotated.texts import AnnotationError
from attnscope.core.attention.seam import AttentionCall, attention_weights
from attnscope.core.questions.combined import ASKED, Combinations, CombinedLinks
from attnscope.core.questions.contacts import SEPARATIONS, Contacts, correct_maps, pairs_of, precision
from attnscope.core.questions.relations import LinkFacts, Links, links_of_weights
from attnscope.studies.relations.combined import add_up, find_scores
from attnscope.studies.relations.study import RelationsOptions, relations
from attnscope.views.drawing.style import Style
from attnscope.views.relations import figures as relations_figures
from tests.conftest import Run

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
LAYERS, HEADS = 3, 5


# Contacts ---------------------------------------------------------------------------------------------------------


def test_average_product_correction_by_hand() -> None:
    maps = torch.tensor([[[0.0, 1.0, 3.0], [2.0, 0.0, 0.0], [1.0, 4.0, 0.0]]])
    both = np.array([[0, 3, 4], [3, 0, 4], [4, 4, 0]], float)
    sums = both.sum(1)
    expected = both - np.outer(sums, sums) / both.sum()
    np.testing.assert_allclose(correct_maps(maps)[0], expected, rtol=1e-6)
    assert not correct_maps(torch.zeros(2, 4, 4)).any()


def test_pairs_are_counted_in_tokens() -> None:
    """Word 1 has two tokens, and between words 2 and 3 stands a token that is none: 0 and 3 are six tokens apart."""
    pairs = pairs_of(torch.tensor([-1, 0, 1, 1, 2, -1, -1, 3, 4, -1]))
    found = dict(zip(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True), pairs.apart.tolist(), strict=True))
    assert found == {(0, 3): 6, (0, 4): 7, (1, 4): 6}
    assert pairs.number_of(torch.tensor([[0, 4], [2, 3], [1, 4]])).tolist() == [1, 2]


def test_precision_by_hand() -> None:
    units = torch.arange(10)
    pairs = pairs_of(units)  # 0-6 .. 3-9: ten pairs
    linked = torch.zeros(10, dtype=torch.bool)
    linked[pairs.number_of(torch.tensor([[0, 6], [1, 9], [2, 8]]))] = True
    scores = torch.zeros(3, 10)
    scores[0, linked] = torch.tensor([3.0, 2.0, 1.0])
    scores[1, ~linked] = torch.arange(1.0, 8.0)
    assert precision(scores, linked, pairs, cut=5).tolist() == pytest.approx([1, 0, 0.3])  # of two; alike: chance
    assert precision(scores, linked, pairs, cut=2).tolist() == pytest.approx([3 / 5, 0, 0.3])
    assert precision(scores, linked, pairs, "short", cut=2).tolist() == pytest.approx([3 / 5, 0, 0.3])
    assert precision(scores, linked, pairs, "medium").isnan().all()


def test_ranges_of_separation_are_those_of_the_field() -> None:
    """Short 6 to 11, medium 12 to 23, long 24 and more, as CASP and the notebooks of ESM have them."""
    pairs = pairs_of(torch.arange(40))
    asked = {name: pairs.apart[pairs.within(name)].unique().tolist() for name in SEPARATIONS}
    assert asked == {
        "all": [*range(6, 40)], "short": [*range(6, 12)], "medium": [*range(12, 24)], "long": [*range(24, 40)],
    }  # fmt: skip
    linked = pairs.within("medium")  # that pairs of another range are right or wrong says nothing
    scores = pairs.apart.float()  # the farther apart, the larger
    assert [precision(scores, linked, pairs, name).item() for name in SEPARATIONS] == [0, 0, 1, 0]


def facts_of(units: Any, contacts: Sequence[Contacts] = (), links: Sequence[tuple[int, int, int]] = ()) -> LinkFacts:
    """Facts of contacts, and of links (text, word, target) between words of one token, all in one cell after theirs."""
    cell = len(contacts)
    units = torch.as_tensor(units)

    def token(text: int, word: int) -> int:
        return int((units[text] == word).nonzero()[0])

    def numbers(rows: Any, *shape: int) -> Any:
        return torch.tensor(rows, dtype=torch.int64).view(*shape)

    return LinkFacts(
        units, numbers([text for text, *_ in links], -1),
        numbers([(row, token(text, word)) for row, (text, word, _) in enumerate(links)], -1, 2),
        numbers([(row, word) for row, (_, word, _) in enumerate(links)], -1, 2), numbers(range(len(links)), -1),
        numbers([(row, target) for row, (*_, target) in enumerate(links)], -1, 2), numbers([cell] * len(links), -1),
        cell + 1, tuple(contacts),
    )  # fmt: skip


def a_call(seed: int, n_texts: int, n: int, layer: int = 0) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n_texts, HEADS, n, 4, generator=generator) for _ in range(3))
    return AttentionCall(layer, "encoder", 3 * query, key, value, 0.5)


def test_tiles_and_whole_maps_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of contacts and of combinations, and both what plain loops say; tiles cut texts into several blocks."""
    units = torch.full((2, 23), -1)
    units[0, 1:21], units[1, 1:17] = torch.arange(20), torch.arange(16)
    units[0, 20] = 18  # its last word has two pieces
    pairs = torch.tensor([[0, 7], [3, 17], [2, 9]])
    links = [(0, 2, 11), (0, 5, 1), (1, 3, 9)]
    facts = facts_of(units, [Contacts(0, 0, pairs), Contacts(1, 1, torch.tensor([[1, 12]]))], links)
    coefficients = torch.randn(1, 4, LAYERS, HEADS, generator=torch.Generator().manual_seed(5))
    coefficients[0, 0] = 1 / (LAYERS * HEADS)
    drawn, drawn_pairs = torch.tensor([[0, 11], [2, 5]]), torch.tensor([[0, 3, 17], [1, 1, 12]])
    tried = Combinations(coefficients, torch.zeros(3, dtype=torch.int64), drawn, drawn_pairs)
    monkeypatch.setattr("attnscope.core.attention.tiles.TILE_ELEMENTS", 400)
    tiled, dense, counted = CombinedLinks(facts, tried), CombinedLinks(facts, tried), Links(facts)
    maps = []
    for layer in range(LAYERS):
        call = a_call(layer, 2, 23, layer)
        tiled(call), counted(call)
        weights = attention_weights(call)
        held = dense.read_weights(layer, weights)
        torch.testing.assert_close(tiled.sums["encoder"][layer], held, atol=1e-6, rtol=1e-5)
        whole = links_of_weights(weights, facts)
        torch.testing.assert_close(counted.sums["encoder"][layer].hits, whole.hits)
        torch.testing.assert_close(counted.sums["encoder"][layer].mass, whole.mass)
        maps.append(np.stack([word_maps(weights[text].numpy(), units[text].numpy()) for text in range(2)], 0))
        # The weights that are drawn: of links as they are, of pairs corrected.
        assert held[0, 1] == pytest.approx(maps[-1][0][1, 2, 11], abs=1e-6)
        assert held[2, 4] == pytest.approx(plainly_corrected(maps[-1][0][4])[3, 17], abs=1e-6)
        best = predicted(plainly_corrected(maps[-1][0][2]), units[0].numpy(), 19)
        hits = sum((a, b) in {(0, 7), (3, 17), (2, 9)} for a, b in best)
        assert whole.hits[0, 2] == pytest.approx(hits)
    one, other = tiled.result(), dense.result()
    torch.testing.assert_close(one.hits, other.hits)
    torch.testing.assert_close(one.precisions, other.precisions, equal_nan=True)
    for number, mix in enumerate(coefficients[0].numpy()):
        rows = [
            (mix[:, :, None] * np.stack([of_layer[text][:, word] for of_layer in maps])).sum((0, 1))
            for text, word, _ in links
        ]
        right = 0
        for row, (text, word, target) in zip(rows, links, strict=True):
            row = np.where(np.arange(20) < (19, 16)[text], row, -np.inf)
            row[word] = -np.inf
            right += int(row.argmax() == target)
        assert one.hits[2, number] == right
        score = sum(
            mix[layer, head] * plainly_corrected(maps[layer][0][head])
            for layer in range(LAYERS)
            for head in range(HEADS)
        )
        best = predicted(score, units[0].numpy(), 19 // 2)
        hits = sum((a, b) in {(0, 7), (3, 17), (2, 9)} for a, b in best)
        assert one.precisions[0, number, ASKED.index(("all", 2))] == pytest.approx(hits / 9)
    assert one.chance[2, 0] == pytest.approx(2 / 18 + 1 / 15)
    assert one.chance[0, 1] == pytest.approx(3 / len(pairs_of(units[0]).first))


def word_maps(weights: Any, units: Any) -> Any:
    """(head, word, word) of one text, to 20 words, by plain loops."""
    made = np.zeros((len(weights), 20, 20))
    for a in range(20):
        for b in range(20):
            rows = weights[:, units == a][..., units == b]
            made[:, a, b] = rows.sum(-1).mean(-1) if rows.size else 0
    return made


def plainly_corrected(one: Any) -> Any:
    both = one + one.T
    return both - np.outer(both.sum(1), both.sum(1)) / both.sum()


def predicted(scores: Any, units: Any, n: int) -> list[tuple[int, int]]:
    start = [int(np.flatnonzero(units == word)[0]) for word in range(units.max() + 1)]
    every = [(a, b) for a in range(len(start)) for b in range(a + 1, len(start)) if start[b] - start[a] >= 6]
    return sorted(every, key=lambda pair: -scores[pair])[:n]


# What is read -----------------------------------------------------------------------------------------------------


def line(**more: Any) -> str:
    return json.dumps({"text": "MKTAYIAKQRQISF", "words": "characters", **more})


def test_undirected_links_are_read() -> None:
    links = [{"between": [[2, 3], [11, 12]], "label": "contact"}, {"between": [[2, 3], [9, 10]], "label": "contact"}]
    text = parse(line(links=links), "a", 1)
    assert text is not None and len(text.words) == 14
    assert text.links == (
        Link("contact", (11,), (2,), True), Link("contact", (2,), (9, 11), True), Link("contact", (9,), (2,), True),
    )  # fmt: skip
    for wrong, said in (
        ([{"between": [[2, 3]]}], "is not two spans"), ([{"between": [[2, 3], [2, 4]]}], "overlaps"),
        ([*links, {"from": [0, 1], "to": [3, 4], "label": "contact"}], 'has "from" in one link and "between"'),
    ):  # fmt: skip
        with pytest.raises(AnnotationError, match=said):
            parse(line(links=wrong), "a", 1)
    with pytest.raises(AnnotationError, match="for links within a text"):
        parse(line(links=links, target="a b"), "a", 1)
    with pytest.raises(AnnotationError, match='neither "characters" nor a list'):
        parse(line(links=links, words="letters"), "a", 1)


# Intervals --------------------------------------------------------------------------------------------------------


def scores_of(right: Any) -> list[Any]:
    """Best head, mean and regression at one cut, of precisions (text, combination, asked)."""
    same = np.array([True, *[False] * (right.shape[1] - 1)])
    return find_scores(add_up(right, np.full(right.shape, 0.1), np.ones(right.shape)), same, hits=False)


def test_proteins_that_are_all_right_make_nothing_certain() -> None:
    best, mean = (row[0] for row in scores_of(np.ones((22, 2, 1))))
    least = 0.025 ** (1 / 22)
    assert (best.low, best.high, best.gain_low, best.gain_high) == pytest.approx((least, 1, 0, 0))
    assert (mean.low, mean.gain, mean.gain_low, mean.gain_high) == pytest.approx((least, 0, least - 1, 1 - least))
    chance = np.random.default_rng(0)  # where no two agree, Student's interval has seen how far they are apart
    parted = np.stack([np.full(22, 0.5), 0.7 + chance.normal(0, 0.05, 22)], 1)[..., None]
    (gain,) = scores_of(parted)[1]
    half = stdtrit(21, 0.975) * (parted[:, 1, 0] - 0.5).std(ddof=1) / np.sqrt(22)
    assert (gain.gain_low, gain.gain_high) == pytest.approx((gain.gain - half, gain.gain + half), abs=1e-6)


@pytest.mark.parametrize(("n", "shares"), [(12, (0.99, 0.99)), (22, (0.97, 0.99)), (50, (0.99, 0.99))])
def test_intervals_of_precise_predictions_hold_the_truth(n: int, shares: tuple[float, float]) -> None:
    """In 95 of 100 samples, of six predicted pairs a protein; without what is unseen it was 48, 69 and 92."""
    right = np.random.default_rng(n).binomial(6, np.array(shares)[:, None], (n, 2, 400)) / 6
    best, mean = scores_of(right)
    assert np.mean([one.low <= shares[0] <= one.high for one in best]) > 0.93
    assert np.mean([one.gain_low <= shares[1] - shares[0] <= one.gain_high for one in mean]) > 0.93


# Planted and random heads -----------------------------------------------------------------------------------------


class Planted:
    """A model whose attention is given: maps of a protein by its text's hash, (layer, head, residue, residue)."""

    def __init__(self, model: Any, make: Any) -> None:
        self.model, self.info, self.tokenizer, self.writer = model, model.info, model.tokenizer, model.writer
        self._make, self._made = make, {}
        self.n_runs = 0

    def run(self, batch: Any, probe: Any) -> Any:
        self.n_runs += 1
        size = batch.ids.shape[1]
        maps = np.full((len(batch.ids), LAYERS, HEADS, size, size), 1e-9)
        for text, ids in enumerate(batch.ids.tolist()):
            letters = tuple(one for one in ids if one >= 4)
            if letters not in self._made:  # each protein is run in four passes
                self._made[letters] = self._make(letters)
            maps[text, :, :, 1 : 1 + len(letters), 1 : 1 + len(letters)] = self._made[letters]
        weights = torch.tensor(maps / maps.sum(-1, keepdims=True)).float()
        for layer in range(LAYERS):
            query, key = weights[:, layer].log(), torch.eye(size).expand(len(maps), HEADS, size, size)
            probe(AttentionCall(layer, "encoder", query, key, key, 1.0))


@pytest.fixture(scope="module")
def esm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ESM model as transformers saves it, tiny and random, with its tokenizer, which keeps no offsets."""
    from transformers import EsmConfig, EsmModel, EsmTokenizer

    folder = tmp_path_factory.mktemp("esm")
    vocabulary = ["<cls>", "<pad>", "<eos>", "<unk>", *RESIDUES, "X", "<mask>"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    EsmTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = EsmConfig(
        vocab_size=len(vocabulary), hidden_size=40, num_attention_heads=HEADS, num_hidden_layers=LAYERS,
        intermediate_size=32, max_position_embeddings=130, pad_token_id=1, mask_token_id=25,
        position_embedding_type="rotary", token_dropout=True,
    )  # fmt: skip
    EsmModel(config, add_pooling_layer=False).eval().save_pretrained(folder)
    return folder


def proteins(n: int, seed: int, shuffled: bool = False) -> list[AnnotatedText]:
    """Proteins of random residues, with the contacts that `contacts_of` says, or shuffled ones."""
    chance = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        text = "".join(chance.choice(list(RESIDUES), int(chance.integers(30, 40))))
        pairs = contacts_of(text) if not shuffled else drawn_contacts(len(text), chance)
        targets: dict[int, list[int]] = {}
        for a, b in pairs:
            targets.setdefault(a, []).append(b)
            targets.setdefault(b, []).append(a)
        links = tuple(Link("contact", (a,), tuple(sorted(mine)), True) for a, mine in sorted(targets.items()))
        made.append(AnnotatedText(text, tuple((i, i + 1) for i in range(len(text))), links, "made up", 1))
    return made


def contacts_of(text: str) -> list[tuple[int, int]]:
    return drawn_contacts(len(text), np.random.default_rng(list(text.encode())))


def drawn_contacts(n: int, chance: Any) -> list[tuple[int, int]]:
    every = [(a, b) for a in range(n) for b in range(a + 6, n)]
    return [every[at] for at in chance.choice(len(every), n, replace=False)]


def planted_maps(halves: bool, strength: float = 3.0) -> Any:
    """Random maps, and head L1H2 that attends to the contacts; or L1H2 to one half of them, and L2H0 to the other."""

    def make(ids: Sequence[int]) -> Any:
        text = "".join(RESIDUES[one - 4] for one in ids)
        chance = np.random.default_rng([len(text), *text.encode()])
        maps = chance.gamma(1.0, size=(LAYERS, HEADS, len(text), len(text)))
        for number, (a, b) in enumerate(contacts_of(text)):
            for layer, head, mine in ((1, 2, not halves or number % 2), (2, 0, halves and not number % 2)):
                if mine:
                    maps[layer, head, a, b] += strength
                    maps[layer, head, b, a] += strength
        return maps

    return make


TOGETHER = RelationsOptions(combine=True)


def test_two_heads_that_know_half_of_the_contacts_each(esm: Path) -> None:
    model = Planted(attnscope.load(str(esm), check=False), planted_maps(True))
    found = relations(model, proteins(44, 0), TOGETHER)
    one = found["contact"]
    assert one.is_mutual and set(zip(*np.nonzero(one.found), strict=True)) == {(1, 2), (2, 0)}
    (combined,) = found.combined
    assert set(combined.heads) == {(1, 2), (2, 0)}
    assert dict(combined.tried)[2] == max(value for _, value in combined.tried)
    assert combined.mean.gain_low > 0.1 and combined.mean.value > combined.best_head.value
    assert combined.regression is not None and combined.regression.gain_low > 0.1
    assert {place[:2] for place in combined.coefficients[:2]} == {(1, 2), (2, 0)}
    assert combined.n_texts_fitted == 20
    assert combined.best_head.value == pytest.approx(one.accuracy[one.best], abs=0.02)  # over proteins, not pairs
    asked = {(at.range, at.cut): at for at in combined.precisions}
    assert {*asked} == {*ASKED}
    assert asked["all", 5].mean.value > asked["all", 1].mean.value > 0.5
    for at in combined.precisions:
        assert min(at.mean.value, at.best_head.value) > 1.2 * at.chance, (at.range, at.cut)
    assert combined.mean.value == asked["all", 1].mean.value


def test_shuffled_contacts_give_nothing(esm: Path) -> None:
    nothing_in_shuffled_contacts(esm, range(1))


@pytest.mark.slow
def test_shuffled_contacts_give_nothing_in_many_samples(esm: Path) -> None:
    nothing_in_shuffled_contacts(esm, range(20))


def nothing_in_shuffled_contacts(esm: Path, seeds: Sequence[int]) -> None:
    """Heads that know contacts, and those of other proteins: chance, however they are put together."""
    model = Planted(attnscope.load(str(esm), check=False), planted_maps(True))
    above = []
    for seed in seeds:
        found = relations(model, proteins(40, seed, shuffled=True), TOGETHER)
        assert not found["contact"].found.any(), seed
        (combined,) = found.combined
        for score in combined.scores:
            if score is not None:
                assert score.low < combined.chance < score.high or abs(score.value - combined.chance) < 0.05, seed
                above.append(score.value - combined.chance)
    # The mean over samples is nearer to chance the more there are; 600 predicted pairs a sample.
    assert abs(np.mean(above)) < 0.03 / np.sqrt(len(seeds)), above


def test_random_heads_do_not_gain_by_being_chosen(esm: Path) -> None:
    """On what they are chosen by, the best of 15 random heads are above chance; on the other half they are not."""
    plain = attnscope.load(str(esm), check=False)
    inflated, held = [], []
    for seed in range(4):

        def make(ids: Sequence[int], seed: int = seed) -> Any:
            return np.random.default_rng([seed, *ids]).gamma(0.3, size=(LAYERS, HEADS, len(ids), len(ids)))

        model = Planted(plain, make)
        (combined,) = relations(model, proteins(24, seed), TOGETHER).combined
        inflated.append(max(value for _, value in combined.tried) - combined.chance)
        held += [score.value - combined.chance for score in combined.scores if score is not None]
    assert np.mean(inflated) > 0.02
    assert abs(np.mean(held)) < 0.01


# On the command line ----------------------------------------------------------------------------------------------


def write_contacts(path: Path, texts: Sequence[AnnotatedText]) -> None:
    """As somebody would write them: each contact once."""
    with path.open("w") as file:
        for text in texts:
            pairs = [(one.source[0], target) for one in text.links for target in one.targets if one.source[0] < target]
            links = [{"between": [[a, a + 1], [b, b + 1]], "label": "contact"} for a, b in pairs]
            file.write(json.dumps({"text": text.text, "words": "characters", "links": links}) + "\n")


def test_an_esm_model_and_proteins_through_the_whole_road(esm: Path, run: Run, tmp_path: Path) -> None:
    write_contacts(tmp_path / "contacts.jsonl", proteins(44, 3))
    asked = ("relations", "contacts.jsonl", "-m", str(esm), "--combine", "-o", "out", "-f", "npz,json,csv,parquet")
    status, out, err = run(*asked)
    assert status == 0, err
    for expected in ("contact ≥6, L ", "contact short, L/2", "contact long, L/5", "regression", "no "):
        assert expected in out
    (one,) = json.loads((tmp_path / "out/relations.json").read_text())["combined"]
    assert one["n_scored"] == one["n_texts_scored"] == 22
    assert len(one["precisions"]) == 12 and one["chance"] == pytest.approx(0.08, abs=0.02)
    found = attnscope.load_record(tmp_path / "out/relations.npz")
    assert found["contact"].is_mutual and found.to_csv() == (tmp_path / "out/relations.csv").read_text()
    rows = [row.split(",") for row in found.to_csv().splitlines()]
    named = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    assert [row["combination"] for row in named].count("mean") == 12
    assert {row["head"] for row in named if row["combination"]} == {""}
    assert "contact medium, L/2" in run("show", "out")[1]


@pytest.mark.slow
def test_two_processes_reach_what_one_does(esm: Path, run: Run, tmp_path: Path) -> None:
    write_contacts(tmp_path / "contacts.jsonl", proteins(60, 3))
    for folder, workers in (("one", ()), ("two", ("--workers", "2"))):
        asked = ("relations", "contacts.jsonl", "-m", str(esm), "--combine", "-o", folder, "-f", "csv", *workers)
        status, _, err = run(*asked)
        assert status == 0, err
    assert (tmp_path / "one/relations.csv").read_text() == (tmp_path / "two/relations.csv").read_text()


def test_far_contacts_alone_count(esm: Path, run: Run, tmp_path: Path) -> None:
    near = {"between": [[0, 1], [5, 6]]}
    (tmp_path / "near.jsonl").write_text(line(links=[near]) + "\n")
    status, out, err = run("relations", "near.jsonl", "-m", str(esm))
    assert (status, out) == (1, "")
    assert "undirected links whose words are too near each other" in err
    (tmp_path / "far.jsonl").write_text(line(links=[near, {"between": [[0, 1], [6, 7]]}]) + "\n")
    status, out, err = run("relations", "far.jsonl", "-m", str(esm), "--json", "--combine")
    assert status == 0, err
    told = json.loads(out)
    (one,) = told["relations"]
    assert (one["n"], one["is_mutual"], one["why_no_verdict"]) == (14, True, "fewer than 20 examples")
    assert "combined" not in told  # nothing with a verdict


def test_what_heads_reach_together_is_drawn(tmp_path: Path) -> None:
    record = attnscope.load_record(Path(__file__).parent / "records" / "combined.npz")
    assert [path.name for path in record.draw(tmp_path)] == ["relations.png", "relations-together.png"]
    pages = dict(relations_figures.pages(record, Style(width="column")))
    dots = pages["relations-together"].axes.findobj(Circle)
    said = [text.get_text() for text in pages["relations-together"].axes.findobj(Text)]
    (one,) = record.combined
    assert len(dots) == 2 + 2 * len(one.precisions) and "regression" not in said  # there was none; two name the colours
    assert "contact medium, L/5" in said
    plain = replace(record, combined=())
    assert [stem for stem, _ in relations_figures.pages(plain)] == ["relations"]
