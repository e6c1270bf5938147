"""Study the heads of a model on any amount of text: measures, roles with their evidence, and descriptions.

This module does the steps in their order and makes the record. `measuring` runs the model, `roles` gives heads their
roles by statistical tests, and `studies.describe` describes heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from attnscope.choice import Choice
from attnscope.core.plain_torch import with_default_torch
from attnscope.corpus import (
    BLOCK,
    BLOCK_CHARACTERS,
    CopyFilter,
    CorpusText,
    chunks,
    count_tokens,
    distinct,
    repeat_probe,
)
from attnscope.errors import AttnscopeError, UsageError
from attnscope.models.model import Model, example_tokens
from attnscope.options import refuse_beside
from attnscope.questions.ablate import AblateOptions
from attnscope.questions.heads import Heads, parse_measures
from attnscope.results.result import settle_corpus
from attnscope.results.table import Table
from attnscope.studies.ablate.study import ablate
from attnscope.studies.describe.rows import SampledText, TextSampler
from attnscope.studies.describe.study import add_descriptions
from attnscope.studies.failures import add_step
from attnscope.studies.heads.measure_intervals import MIN_ACTIVE_SHARE
from attnscope.studies.heads.measuring import HeadMeasurer, HeadSums
from attnscope.studies.heads.needles import read_vocabulary, retrieval_heads
from attnscope.studies.heads.options import RETRIEVAL, HeadsCommandOptions, HeadsOptions
from attnscope.studies.heads.roles import (
    CRITERIA,
    RULES,
    complete_thresholds,
    effective_texts,
    judge,
)
from attnscope.studies.inputs.options import CorpusOptions, LoadOptions
from attnscope.studies.inputs.texts import (
    AnyTexts,
    Progress,
    ReportProgress,
    Texts,
    describe_texts,
    scale_report,
    share_read,
    special_ids,
    texts_of,
)
from attnscope.studies.run import CorpusRun, run
from attnscope.studies.senses.study import picture_heads, sound_heads
from attnscope.studies.workers import Workers

N_PROBE_TEXTS = 50
"""How many texts of repeated random tokens `--probe repeat` has."""

N_RANDOM_TOKENS = 50
"""How many random tokens each of them has, before they come again."""

N_ABLATED_TEXTS = 32
"""How many texts heads are ablated on: it takes a forward pass for each head and text."""

NEGLIGIBLE_EFFECTS = {"kl": 0.001, "l2": 0.01}
"""Smaller effects of an ablation count as none, by quantity: nats of the predictions, or a share of hidden states."""

_EFFECT_MEANINGS = {
    "kl": "KL of the predictions (nats)",
    "l2": "relative change of the last hidden states",
}
"""What each quantity is."""

_N_TEXTS_PER_REPORT = 32
"""How many texts there are between two reports while tokens are counted, which takes microseconds per text."""


@with_default_torch
def heads(
    model: Model,
    corpus: AnyTexts,
    options: HeadsOptions | None = None,
    report: ReportProgress | None = None,
    workers: Workers | None = None,
) -> Heads:
    """Measure every head of a model on a corpus, and give it roles.

        model = attnscope.load("minilm")
        found = attnscope.heads(model, attnscope.Corpus(["corpus/*.txt"], split="paragraph"))
        found["heads"]["role"]  # (head,): previous_token, …
        found.roles_of(found.row(0, 2)).to_pandas()  # the evidence: value, interval, q
        found["heads"].grid("entropy_nats", "encoder")  # (layer, head)
        found.save("heads.npz")

    Memory does not grow with the corpus. It does not grow with the square of a text's length either, unless the model
    only has dense weights. Near-duplicates of an earlier text are dropped (`corpus["n_copies"]` counts them).

    Texts are measured in blocks. An interruption (KeyboardInterrupt) ends the study: the record covers the texts up to
    the last whole block, and says that it is incomplete. If a later step fails, `run["failures"]` says what.

    The decoder of an encoder-decoder writes the text that its encoder reads: it gets its start token first, then each
    token of the text. Its own heads and those of cross-attention are listed by kind. Measures that compare positions in
    one text are undefined for cross-attention.

    Blocks are added in the order of the texts, so the same call gives the same numbers. torch rounds the sums of
    one text differently with another number of threads.

    With `workers`, the result is that of one process with as many threads. After an interruption, all finished blocks
    count. If three workers die on the same block, `corpus["problems"]` lists it, and the result has the other blocks.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: The texts: a Corpus, or a list of texts.
        options: The choices of the study; None = the defaults.
        report: The function to call after each batch; with workers, after each block.
        workers: The workers that study the blocks, each with its own copy of the model; None = this process.

    Raises:
        AttnscopeError: There is no text, the model cannot be measured, or no worker can begin.
    """
    options = options or HeadsOptions()
    texts = texts_of(corpus, model)
    return study_heads(model, texts, options, report, workers)[0]


def study(
    spec: str,
    texts: CorpusOptions,
    order: HeadsCommandOptions,
    loading: LoadOptions,
    report: ReportProgress | None,
    workers: Workers | None = None,
) -> Heads:
    """Load a model, and study its heads on texts, repeated tokens, needles, photos or recordings: `attnscope heads`.

    Roles and measures that do not exist are refused before the model loads.

    Args:
        spec: The name of the model.
        texts: The texts of the command line.
        order: Its other input, and its options for the study.
        loading: How the model is loaded.
        report: The function to call with the progress.
        workers: As for `heads`.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    options = order.heads
    if order.image or order.audio:
        from attnscope.core.catalogue import PICTURE_MEASURES, SOUND_MEASURES

        names = PICTURE_MEASURES if order.image else SOUND_MEASURES
        parse_measures(order.measures, tuple(names))
        model = loading.load(spec)
        if order.image:
            return picture_heads(model, list(order.image), report)
        return sound_heads(model, list(order.audio), texts.text, report)
    if order.probe == "needle":
        # Needles have options of their own. Of those of a study on texts, only thresholds may be given, and
        # --no-describe, for nothing is described.
        refuse_beside(
            "--probe needle",
            replace(options, thresholds={}, describe=HeadsOptions().describe),
            workers=workers,
            pick=order.describing.pick,
        )
        thresholds = complete_thresholds(options.thresholds, {RETRIEVAL: order.needles.threshold})
        needles = replace(order.needles, threshold=thresholds[RETRIEVAL])
        parse_measures(order.measures, needles.measure_names)
        haystacks = texts.corpus() if texts.is_given else None
        return retrieval_heads(loading.load(spec), haystacks, needles, report)
    # What is left are texts and `--probe repeat`. Check all that can be wrong before the model loads.
    if order.probe is not None and texts.is_given:
        raise UsageError("give one of TEXT, --file and --probe", 'such as --file "corpus/*.txt"')
    corpus = None if order.probe else texts.corpus()
    require_names(options, order.measures)
    model = loading.load(spec)
    return heads(model, make_probe_texts(model) if corpus is None else corpus, options, report, workers)


def require_names(options: HeadsOptions, measures: str | None) -> None:
    """Refuse roles and measures that do not exist, before the model runs for minutes.

    Args:
        options: The options, which name roles by their thresholds.
        measures: Names of measures with commas between, as `--measures` takes them; None = there are none.
    """
    from attnscope.core.catalogue import measure_names

    complete_thresholds(options.thresholds)
    parse_measures(measures, measure_names())


def make_probe_texts(model: Model) -> list[CorpusText]:
    """Return the texts of `--probe repeat`: random tokens of the model's vocabulary that come twice.

    They stand between the model's special tokens, and are the same in each call.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    ordinary, before, after = read_vocabulary(model)
    return list(repeat_probe(ordinary, N_PROBE_TEXTS, N_RANDOM_TOKENS, 0, before=before, after=after))


def study_heads(
    model: Model,
    texts: Texts,
    options: HeadsOptions,
    report: ReportProgress | None = None,
    workers: Workers | None = None,
    measurer: Callable[..., HeadMeasurer] = HeadMeasurer,
    empty: HeadSums | None = None,
) -> tuple[Heads, HeadSums]:
    """Study heads as `heads` does, and return the sums over texts as well as the findings.

    A caller may have its own measurer, which keeps more of each block.

    Args:
        model: As for `heads`.
        texts: The texts, from `texts_of`.
        options: As for `heads`.
        report: As for `heads`.
        workers: As for `heads`.
        measurer: Makes the measurer; it takes the arguments of `HeadMeasurer`, and is pickled if there are workers.
        empty: The sums of that measurer over no text; None = `HeadSums()`.
    """
    # Refuse roles, heads and chunks that do not fit the model before anything is read.
    thresholds = complete_thresholds(options.thresholds)
    describing = options.describe
    if describing is not None:
        Choice(pick=describing.heads).within(model.info)
    cut: dict[str, Any] = {"chunk": options.chunk, "stride": options.stride}
    chunks(example_tokens(model.tokenizer), limit=model.info.max_tokens, **cut)

    # Read the corpus once, to count tokens and to draw the texts by which heads are described.
    n_steps = 2 if options.causal else 1
    step_report = scale_report(report, 0, n_steps)
    special = special_ids(model)
    copies = CopyFilter()
    originals = distinct(texts, copies)
    sample: list[SampledText] = []
    if describing is not None:
        drawing = TextSampler(describing.seed)
        originals = drawing.watch(originals)
    counts = count_tokens(
        originals, model.tokenizer.encode, special, partial(_report_counting, step_report, texts)
    )
    if describing is not None:
        sample = drawing.sample(model, describing, **cut)
    # Keep the hash of the texts and their problems: if a later reading is interrupted, they cannot be known.
    read = describe_texts(texts)

    # Run the model, then its untrained twin if a control is asked for. Keep the rows of the sample.
    make = partial(measurer, counts=counts, special=special, **cut)
    makers = [partial(make, sampled={unit.key: unit.queries for unit in sample})]
    if options.control:
        makers.append(partial(make, seed=options.seed))
    runs: list[CorpusRun[HeadSums]] = []
    problems = read["problems"]
    shared = (workers,) if workers else None
    empty = empty or HeadSums()
    for number, maker in enumerate(makers):
        run_report = scale_report(step_report, number, len(makers))
        last = run(maker, (model,), texts, empty, block_size=BLOCK, workers=shared, report=run_report)
        runs.append(last)
        problems = [*problems, *last.problems(model.info)]
        if not last.complete:
            break
    done = runs[0].done
    done.left_out.require_some_left(done.n_texts, model.info)
    if last.complete and not done.n_tokens and problems == read["problems"]:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")

    # Give roles, describe the heads by the rows that were kept, and ablate those that have a role.
    corpus = runs[0].corpus(texts, model.info)
    corpus |= {"n_copies": copies.n, "sha256": read["sha256"], "problems": problems}
    findings = _give_roles(model, corpus, options, thresholds, runs, workers)
    if describing is not None:
        for unit in sample:
            unit.rows = done.rows.get(unit.key, {})
        describe = partial(
            add_descriptions, model=model, sample=sample, counts=counts, options=describing
        )
        findings = add_step(findings, "describing the heads", describe)
    if options.causal:
        step_report = scale_report(report, 1, n_steps)
        ablate_heads = partial(add_ablation_effects, model=model, texts=texts, report=step_report)
        findings = add_step(findings, "--causal", ablate_heads)
    return findings, done


def _give_roles(
    model: Model,
    corpus: dict[str, Any],
    options: HeadsOptions,
    thresholds: Mapping[str, float],
    runs: Sequence[CorpusRun[HeadSums]],
    workers: Workers | None,
) -> Heads:
    """Return the findings: roles of the heads of the model, and of the control by the same thresholds.

    Args:
        model: The model.
        corpus: The `corpus` of the record, except for `effective_texts` and `complete`.
        options: The choices of the study.
        thresholds: The threshold of each role.
        runs: The run of the model, and that of the control if there is one.
        workers: The workers of the study, for the number of threads in the record.
    """
    import torch

    done = runs[0].done
    tables = judge(done.sums_by_kind.values(), thresholds, done.n_texts)
    control = runs[1].done.sums_by_kind if len(runs) > 1 else {}
    tables["control"] = judge(control.values(), thresholds, done.n_texts)["heads"]
    corpus["effective_texts"] = max(map(effective_texts, done.sums_by_kind.values()), default=0.0)
    # The study went as far as its last run did, and failed where that failed.
    corpus = settle_corpus(corpus, interrupted=not runs[-1].complete)
    about = replace(runs[0], failures=runs[-1].failures).about(model.info, _measuring_notes(model))
    about |= {
        "seed": options.seed if options.control else None,
        "threads": workers.threads if workers else torch.get_num_threads(),
    }
    return Heads(about, corpus, _describe_options(options, thresholds), tables)


def _report_counting(report: ReportProgress | None, texts: Texts, n_texts: int, n_tokens: int) -> None:
    """Report how many texts and tokens were counted, once in a while."""
    if report is not None and n_texts % _N_TEXTS_PER_REPORT == 0:
        report(Progress(n_texts, n_tokens, share_read(texts), "counting tokens"))


def _measuring_notes(model: Model) -> list[str]:
    """Return sentences on how this model was measured that a reader of the record must know."""
    notes = []
    if len(model.info.kinds) > 1:
        notes.append(
            "The decoder was given the text that the encoder read, as if it were to write it again."
        )
    if model.info.path == "eager":
        notes.append(
            "Measured on the model's own dense weights: memory grows with the square of a text's length."
        )
    return notes


def _describe_options(options: HeadsOptions, thresholds: Mapping[str, float]) -> dict[str, Any]:
    """Return the `options` of the record: the choices of the study, and all roles and measures."""
    from attnscope.core.catalogue import measure_names

    return {
        **CRITERIA,
        "least_active": MIN_ACTIVE_SHARE,
        "chunk": options.chunk,
        "stride": options.stride,
        "block": BLOCK,
        "block_characters": BLOCK_CHARACTERS,
        "control": f"untrained, seed {options.seed}" if options.control else None,
        "roles": {name: rule.describe(thresholds[name]) for name, rule in RULES.items()},
        "measures": list(measure_names()),
    }


def add_ablation_effects(
    findings: Heads, model: Model, texts: Texts, report: ReportProgress | None
) -> Heads:
    """Ablate each head that has a role, on the first N_ABLATED_TEXTS texts, and add the effects to the table of heads.

    A head's output is replaced by zero, and by its mean. If neither changes anything, the model does not use what the
    head attends to: attention is no evidence of use (Jain and Wallace 2019).

    Raises:
        AttnscopeError: The model cannot be ablated.
    """
    # Ablate one kind of attention after the other, for each numbers its layers and heads from 0.
    heads = findings.table("heads")
    has_role = heads["role"] != ""
    with_role = heads.select(has_role)
    first = list(islice(distinct(texts, CopyFilter()), N_ABLATED_TEXTS))
    kinds = list(dict.fromkeys(with_role["kind"].tolist()))
    ablations = []
    for number, kind in enumerate(kinds):
        pick = tuple(with_role.select(with_role["kind"] == kind).layer_heads)
        options = AblateOptions(choice=Choice(pick=pick), kind=kind)
        ablations.append(ablate(model, first, options, scale_report(report, number, len(kinds))))
    if not ablations:
        return findings
    # Effects become columns of the table of heads; they are NaN for heads without a role.
    ablated = Table.stack([ablation.table("heads") for ablation in ablations])
    columns = dict(heads.columns)
    columns |= {name: ablated.columns[name] for name in ablated.number_columns}
    values = dict(heads.values)
    for name, effects in ablated.values.items():
        # Kind, layer and head are in the table already.
        if name not in heads:
            values[name] = np.full(len(heads), np.nan)
            values[name][has_role] = effects

    # Say how effects were measured: by the predictions if the model makes any (then there is a table `whole`), else by
    # hidden states.
    complete = all(ablation.corpus["complete"] for ablation in ablations)
    notes = list(findings.run["notes"])
    for ablation in ablations:
        notes += ablation.run["notes"]
    ablation = ablations[0]
    quantity = "kl" if len(ablation.table("whole")) else "l2"
    causal = {
        "quantity": quantity,
        "what": _EFFECT_MEANINGS[quantity],
        "nothing_below": NEGLIGIBLE_EFFECTS[quantity],
        "modes": list(ablation.options["modes"]),
        "predicted": ablation.options["predicted"],
        "n_texts": ablation.corpus["n_texts"],
        "complete": complete,
    }
    return replace(
        findings,
        tables={**findings.tables, "heads": Table(columns, values)},
        options={**findings.options, "causal": causal, "quantities": list(ablation.quantities)},
        run={**findings.run, "notes": list(dict.fromkeys(notes))},
        corpus=settle_corpus(findings.corpus, interrupted=not complete),
    )
