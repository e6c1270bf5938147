"""The study of heads when it is interrupted, and how much memory it takes."""

import gc
import tracemalloc

import pytest

import attnscope
import attnscope.studies.heads.study as study
from attnscope.corpus import chunks
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.heads.study import heads
from tests.conftest import SENTENCES, write_tiny_t5
from tests.heads_helpers import after, fix_counts, small_blocks

__all__ = ["small_blocks"]


@pytest.fixture
def fixed_counts(own, monkeypatch):
    """Tokens are as frequent in some of the texts as in all."""
    fix_counts(monkeypatch, own, "the the the")


@pytest.mark.parametrize("spec", ["own", "seam"])
def test_an_interruption_in_the_first_block_keeps_what_was_done(spec, own, tmp_path, monkeypatch):
    if spec == "seam":
        write_tiny_t5(tmp_path / "t5")
        own = attnscope.load(str(tmp_path / "t5"))
    monkeypatch.setattr("attnscope.studies.heads.measuring.TOKEN_BUDGET", 1)  # a batch for each chunk
    options = HeadsOptions(chunk=30, stride=20)
    long = " ".join(SENTENCES[:4])
    texts = ["a", long, "the cat", *SENTENCES[:3]]
    assert len(chunks(own.tokenizer.encode(long), chunk=30, stride=20)) > 1
    n_whole = 0
    for n in range(1, 20, 2):
        found = heads(own, texts, options, after(n - 1))
        if found.corpus["complete"]:
            break
        n_texts = found.corpus["n_texts"]
        assert bool(len(found["heads"])) == bool(n_texts)
        if 0 < n_texts < 6:
            n_whole += 1
            assert f"these are {n_texts} of its 6" in found.run["notes"][-1]
    assert n_whole > 1


@pytest.mark.usefixtures("fixed_counts")
def test_what_an_interruption_keeps_is_what_those_texts_say(own, monkeypatch):
    monkeypatch.setattr("attnscope.studies.heads.measuring.TOKEN_BUDGET", 30)  # a batch for each text
    options = HeadsOptions(describe=None)
    by_length = sorted(SENTENCES[:6], key=lambda text: len(own.tokenizer.encode(text)))
    found = heads(own, SENTENCES[:6], options, after(1))
    n = found.corpus["n_texts"]
    assert 0 < n < 6
    expected = heads(own, by_length[-n:], options)
    assert found.corpus["n_tokens"] == expected.corpus["n_tokens"]
    assert expected.corpus["n_texts"] == n
    assert found.as_json()["heads"] == expected.as_json()["heads"]


def test_an_interruption_before_any_text_is_done_leaves_a_record_of_nothing(own, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("attnscope.studies.heads.measuring.HeadMeasurer.measure", interrupted)
    found = heads(own, SENTENCES)
    assert len(found["heads"]) == 0
    assert found.corpus["n_texts"] == 0
    assert found.corpus["complete"] is False


@pytest.mark.usefixtures("small_blocks")
def test_an_interruption_of_the_control_keeps_the_rest(own):
    found = heads(own, SENTENCES[:12], HeadsOptions(control=True), after(4))
    assert not found.corpus["complete"]
    assert found.corpus["n_texts"] == 12
    assert len(found["control"])


# Memory ----------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_the_corpus(tiny_bert, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "BLOCK", 20)
    model = attnscope.load(str(tiny_bert))

    # Of files alike: one of them may be in memory up to 64 KiB.
    files = [tmp_path / f"{number}.txt" for number in range(30)]
    for path in files:
        lines = (f"the cat a b w{path.stem}x{i}.\na b c d e f w{path.stem}x{i}.\n" for i in range(10))
        path.write_text("".join(lines), "utf-8")  # no copies

    class Collecting(attnscope.Corpus):
        """Python keeps up to 2,000 freed tuples of each length for later, and counts them, until it collects."""

        def __iter__(self):
            for number, text in enumerate(super().__iter__()):
                if number % 20 == 0:
                    gc.collect()
                yield text

    def peak(n):
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
