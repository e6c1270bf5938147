"""Threads that use one model: each gets what it would get alone, whatever the others study meanwhile."""

import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoTokenizer

import attnscope
from attnscope.core.attention.probes import WeightsRecorder
from attnscope.core.attention.seam import attend
from attnscope.models import locks
from attnscope.models.inside.projections import hooks
from attnscope.models.model import Batch
from attnscope.pages import Page
from tests.ablation_helpers import tiny
from tests.conftest import VOCABULARY, write_tiny, write_tokenizer
from tests.record_helpers import require_close

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = [
    "the cat sat on the mat",
    "a dog saw the cat",
    "the mat was red",
    "on a mat sat a dog and the cat",
]

SENTENCES = """\
1\tthe\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tcat\t_\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tsat\t_\tVERB\t_\t_\t0\troot\t_\t_

1\ta\t_\tDET\t_\t_\t2\tdet\t_\t_
2\tdog\t_\tNOUN\t_\t_\t3\tnsubj\t_\t_
3\tran\t_\tVERB\t_\t_\t0\troot\t_\t_

"""

STUDIES = {
    "heatmap": lambda model, _: attnscope.heatmap(model, TEXTS[0]),
    "pooled": lambda model, _: attnscope.pooled_heatmap(model, TEXTS[3], cells=8),
    "rollout": lambda model, _: attnscope.rollout(model, TEXTS[1]),
    "page": lambda model, _: attnscope.page(model, TEXTS[0]),
    "trace": lambda model, _: attnscope.trace(model, TEXTS[2], 1),
    "weights": lambda model, _: attnscope.weights(model),
    "heads": lambda model, _: attnscope.heads(model, TEXTS),
    "ablate": lambda model, _: attnscope.ablate(model, TEXTS),
    "importance": lambda model, _: attnscope.ablate(
        model, TEXTS, attnscope.AblateOptions(importance=bool(model.loss))
    ),
    "compare": lambda model, _: attnscope.compare(model, TEXTS),
    "compare texts": lambda model, _: attnscope.compare_texts(
        model, TEXTS[0], TEXTS[0].replace("mat", "dog")
    ),
    "relations": lambda model, folder: attnscope.relations(model, str(folder / "links.conllu")),
    "atlas": lambda model, _: attnscope.atlas(model, TEXTS),
}
"""Every study that reaches a model in memory by more than one way."""


def _model(name, folder):
    (folder / "links.conllu").write_text(SENTENCES * 8, "utf-8")
    if name == "native":
        return attnscope.load(write_tiny(folder / "bert"), engine="native")
    write_tokenizer(folder)
    return attnscope.load(tiny(name, vocab_size=len(VOCABULARY)), AutoTokenizer.from_pretrained(folder))


def _require_same(found, expected, of):
    """The same numbers, but for rounding: threads share what sums are cut into."""
    if isinstance(found, Page):
        assert found.html == expected.html, of
        return
    assert not found.run.get("failures"), of
    require_close(found, expected, of)


@pytest.mark.parametrize(
    "name",
    ["llama", "native", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "gpt2"))],
)
def test_studies_in_four_threads_give_what_each_gives_alone(name, tmp_path):
    model = _model(name, tmp_path)
    alone = {study: STUDIES[study](model, tmp_path) for study in STUDIES}
    todo = list(alone) * 2
    random.Random(0).shuffle(todo)
    with ThreadPoolExecutor(4) as pool:
        for study, found in zip(
            todo, pool.map(lambda study: STUDIES[study](model, tmp_path), todo), strict=True
        ):
            _require_same(found, alone[study], study)
    _require_same(STUDIES["heatmap"](model, tmp_path), alone["heatmap"], "afterwards")
    assert not any(
        module._forward_hooks or module._forward_pre_hooks for module in model.modules()[0].modules()
    )


def _is_free(model):
    """Whether another thread could take its turn with a model now."""

    def take():
        held = locks._locks[model.modules()[0]]
        free = [lock.acquire(blocking=False) for lock in held]
        for lock in itertools.compress(held, free):
            lock.release()
        return all(free)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(take).result()


@pytest.mark.parametrize("name", ["bert", "llama", "native"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_turn_lasts_for_a_pass_and_ends_with_any_error(name, error, tmp_path):
    model = _model(name, tmp_path)
    batch = Batch(torch.arange(5, 12)[None])
    taken = []

    def look(call):
        taken.append(not _is_free(model))
        return attend(call)

    def fail(call):
        raise error("in the middle")

    for run in (model.run, model.outputs):
        run(batch, look)
        assert all(taken)
        assert _is_free(model)
        with pytest.raises(error, match="in the middle"):
            run(batch, fail)
        assert _is_free(model)
    with pytest.raises(error), hooks(list(model.modules()[0].children()), lambda *_: None):
        assert not _is_free(model)
        raise error
    assert _is_free(model)


def test_models_of_one_torch_module_of_its_parts_and_of_one_config_take_turns_together():
    network = tiny("bert")
    whole = attnscope.load(network)
    again = attnscope.load(network)
    part = attnscope.load(network.bert)
    of_one_config = attnscope.load(type(network)(network.config).eval())
    others = [again, part, of_one_config, attnscope.load(tiny("bert"))]

    def look(call):
        assert [_is_free(other) for other in others] == [False, False, False, True]
        return attend(call)

    whole.run(Batch(torch.arange(5, 12)[None]), look)
    # Two parts that were there before the whole.
    parts = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    for module in parts:
        locks.share_lock([module])
    assert not set(locks._locks[parts[0]]) & set(locks._locks[parts[1]])
    locks.share_lock([torch.nn.Sequential(*parts)])
    assert len(locks._locks[parts[0]]) == 2
    assert locks._locks[parts[0]] == locks._locks[parts[1]]


def test_a_probe_may_run_the_model_that_it_watches(tmp_path):
    model = _model("bert", tmp_path)
    batch = Batch(torch.arange(5, 12)[None])
    inner = WeightsRecorder()

    def run_again(call):
        if not inner.maps:
            model.run(batch, inner)
        return attend(call)

    outer = WeightsRecorder()
    model.run(batch, run_again)
    model.run(batch, outer)
    torch.testing.assert_close(inner.maps, outer.maps)
