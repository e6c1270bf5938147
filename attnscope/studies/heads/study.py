"""Study the heads of a model on any amount of text: measures, roles with their evidence, and descriptions.

This module runs the steps in their order and makes the record. `measuring` runs the model, `roles` gives roles to heads
by statistical tests, and `studies.describe` describes heads. A *control* is the same study of a model with random
weights.
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
    MAX_BLOCK_CHARACTERS,
    CopyFilter,
    CorpusText,
    chunks,
    count_tokens,
    distinct,
    generate_repeats,
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
"""The number of texts of `--probe repeat`. Each is a sequence of random tokens that comes twice."""

N_RANDOM_TOKENS = 50
"""The length of this sequence, in tokens."""

N_ABLATED_TEXTS = 32
"""The number of texts on which heads are ablated: few, as ablation takes a forward pass for each head and text."""

NEGLIGIBLE_EFFECTS = {"kl": 0.001, "l2": 0.01}
"""The size below which an effect of an ablation counts as no effect, by quantity (see `_EFFECT_MEANINGS`)."""

_EFFECT_MEANINGS = {
    "kl": "KL of the predictions (nats)",
    "l2": "relative change of the last hidden states",
}
"""The meaning of each quantity by which the effect of an ablation is measured."""

_N_TEXTS_PER_REPORT = 32
"""The number of texts between two progress reports while tokens are counted, which takes microseconds per text."""


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
    returns dense attention weights. Near-duplicates of an earlier text are dropped, and `corpus["n_copies"]` counts
    them.

    Texts are measured in blocks. An interruption (KeyboardInterrupt) ends the study: the record covers all blocks up to
    the interruption, and says that it is incomplete. If a later step fails, such as describing the heads,
    `run["failures"]` says which step and why.

    The decoder of an encoder-decoder reads the same text as its encoder, after its start token (teacher forcing). The
    record lists heads by the kind of their attention: encoder, decoder and cross. Measures that compare positions in
    one text are undefined for cross-attention.

    Blocks are added in the order of the texts, so the same call returns the same numbers. With another number of
    threads, torch rounds the sums of a text differently.

    With `workers`, the result equals that of one process with the same number of threads. After an interruption, all
    finished blocks count. If three workers die on the same block, `corpus["problems"]` lists this block, and the result
    has the other blocks.

    Args:
        model: A loaded model, see `attnscope.load`.
        corpus: The texts: a Corpus, or a list of texts.
        options: The options of the study; None = the defaults.
        report: A callback for progress, called after each batch; with workers, after each block.
        workers: The processes that measure the blocks, each with its own copy of the model; None = this process.

    Raises:
        AttnscopeError: There is no text, the model cannot be measured, or no worker can start.
    """
    options = options or HeadsOptions()
    texts = texts_of(corpus, model)
    return study_heads(model, texts, options, report, workers)[0]


def study(
    spec: str,
    texts: CorpusOptions,
    command: HeadsCommandOptions,
    loading: LoadOptions,
    report: ReportProgress | None,
    workers: Workers | None = None,
) -> Heads:
    """Load a model, and study its heads on texts, repeated tokens, needles, photos or recordings: `attnscope heads`.

    Roles and measures that do not exist are refused before the model loads.

    Args:
        spec: The name of the model.
        texts: The texts of the command line.
        command: The other options of the command: photos, recordings or a probe, and the options of the study.
        loading: The options for loading the model.
        report: A callback for progress.
        workers: As for `heads`.

    Raises:
        AttnscopeError: The input, the options or the model are not possible.
    """
    options = command.heads
    if command.image or command.audio:
        from attnscope.core.catalogue import PICTURE_MEASURES, SOUND_MEASURES

        names = PICTURE_MEASURES if command.image else SOUND_MEASURES
        # Only to raise an error for unknown measures.
        parse_measures(command.measures, tuple(names))
        model = loading.load(spec)
        if command.image:
            return picture_heads(model, list(command.image), report)
        # The text is the transcript of the recording.
        return sound_heads(model, list(command.audio), texts.text, report)
    if command.probe == "needle":
        # Needles have their own options. Of `HeadsOptions`, the user may only set thresholds, and `--no-describe`,
        # which changes nothing here. So these two count as not set.
        refuse_beside(
            "--probe needle",
            replace(options, thresholds={}, describe=HeadsOptions().describe),
            workers=workers,
            pick=command.describing.pick,
        )
        thresholds = complete_thresholds(options.thresholds, {RETRIEVAL: command.needles.threshold})
        needles = replace(command.needles, threshold=thresholds[RETRIEVAL])
        parse_measures(command.measures, needles.measure_names)
        haystacks = texts.corpus() if texts.is_given else None
        return retrieval_heads(loading.load(spec), haystacks, needles, report)
    # The input is texts or `--probe repeat`. Refuse impossible options before the model loads, which takes longer.
    if command.probe is not None and texts.is_given:
        raise UsageError("give one of TEXT, --file and --probe", 'such as --file "corpus/*.txt"')
    corpus = None if command.probe else texts.corpus()
    require_names(options, command.measures)
    model = loading.load(spec)
    return heads(model, make_probe_texts(model) if corpus is None else corpus, options, report, workers)


def require_names(options: HeadsOptions, measures: str | None) -> None:
    """Refuse roles and measures that do not exist, before the model runs for minutes.

    Args:
        options: The options of the study; its thresholds name roles.
        measures: The option `--measures`: names with commas between them; None = no measures.
    """
    from attnscope.core.catalogue import measure_names

    # Both are only called to raise errors.
    complete_thresholds(options.thresholds)
    parse_measures(measures, measure_names())


def make_probe_texts(model: Model) -> list[CorpusText]:
    """Make the texts of `--probe repeat`: random tokens of the model's vocabulary that come twice.

    The model's special tokens stand around them. Each call returns the same texts.

    Raises:
        AttnscopeError: The vocabulary is not known.
    """
    ordinary, prefix_ids, suffix_ids = read_vocabulary(model)
    return list(
        generate_repeats(
            ordinary, N_PROBE_TEXTS, N_RANDOM_TOKENS, 0, prefix_ids=prefix_ids, suffix_ids=suffix_ids
        )
    )


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

    Args:
        model: As for `heads`.
        texts: The texts, from `texts_of`.
        options: As for `heads`.
        report: As for `heads`.
        workers: As for `heads`.
        measurer: Makes the measurer: `HeadMeasurer`, or a subclass that keeps more of each block, such as for an
            atlas. It is pickled if there are workers.
        empty: The measurer's sums over no text; None = `HeadSums()`.
    """
    # Refuse roles, heads and chunks that do not fit the model before anything is read.
    thresholds = complete_thresholds(options.thresholds)
    describing = options.describe
    if describing is not None:
        Choice(pick=describing.heads).within(model.info)
    # Cut an example text into chunks, only to raise an error if chunk or stride are impossible.
    chunk_options: dict[str, Any] = {"chunk": options.chunk, "stride": options.stride}
    chunks(example_tokens(model.tokenizer), limit=model.info.max_tokens, **chunk_options)

    # Read the corpus a first time, to count tokens and to sample the texts from which heads are described.
    n_steps = 2 if options.causal else 1
    step_report = scale_report(report, 0, n_steps)
    special = special_ids(model)
    copies = CopyFilter()
    originals = distinct(texts, copies)
    sample: list[SampledText] = []
    if describing is not None:
        # The sampler sees each text that `count_tokens` reads.
        sampler = TextSampler(describing.seed)
        originals = sampler.watch(originals)
    counts = count_tokens(
        originals, model.tokenizer.encode, special, partial(_report_counting, step_report, texts)
    )
    if describing is not None:
        sample = sampler.sample(model, describing, **chunk_options)
    # Keep the hash and the problems of the texts now: they are not known if the second reading is interrupted.
    read = describe_texts(texts)

    # Read the corpus again, to measure the model, and once more to measure the control if there is one. Only the model
    # keeps the attention of the sampled queries.
    make = partial(measurer, counts=counts, special=special, **chunk_options)
    makers = [partial(make, sampled={unit.key: unit.queries for unit in sample})]
    if options.control:
        makers.append(partial(make, seed=options.seed))
    runs: list[CorpusRun[HeadSums]] = []
    problems = read["problems"]
    shared = (workers,) if workers else None
    for number, maker in enumerate(makers):
        run_report = scale_report(step_report, number, len(makers))
        last = run(
            maker,
            (model,),
            texts,
            empty or HeadSums(),
            block_size=BLOCK,
            workers=shared,
            report=run_report,
        )
        runs.append(last)
        problems = [*problems, *last.problems(model.info)]
        if not last.complete:
            break
    sums = runs[0].done
    sums.left_out.require_some_left(sums.n_texts, model.info)
    # Without tokens, and without problems that explain it, the texts have no words.
    if last.complete and not sums.n_tokens and problems == read["problems"]:
        raise AttnscopeError("no text is left: none has any token", "give texts with words in them")

    # Give roles, describe the heads by the attention of sampled queries, and ablate the heads with a role.
    corpus = runs[0].corpus(texts, model.info)
    corpus |= {"n_copies": copies.n_dropped, "sha256": read["sha256"], "problems": problems}
    findings = _give_roles(model, corpus, options, thresholds, runs, workers)
    if describing is not None:
        for unit in sample:
            unit.rows = sums.rows.get(unit.key, {})
        describe = partial(
            add_descriptions, model=model, sample=sample, counts=counts, options=describing
        )
        findings = add_step(findings, "describing the heads", describe)
    if options.causal:
        step_report = scale_report(report, 1, n_steps)
        ablate_heads = partial(add_ablation_effects, model=model, texts=texts, report=step_report)
        findings = add_step(findings, "--causal", ablate_heads)
    return findings, sums


def _give_roles(
    model: Model,
    corpus: dict[str, Any],
    options: HeadsOptions,
    thresholds: Mapping[str, float],
    runs: Sequence[CorpusRun[HeadSums]],
    workers: Workers | None,
) -> Heads:
    """Return the findings: the roles of the model's heads, and of the control's heads by the same thresholds.

    Args:
        model: The model.
        corpus: The `corpus` of the record, except for `effective_texts` and `complete`.
        options: The options of the study.
        thresholds: The threshold of each role.
        runs: The run of the model, and the run of the control if there is one.
        workers: The workers of the study, for the number of threads in the record.
    """
    import torch

    sums = runs[0].done
    tables = judge(sums.sums_by_kind.values(), thresholds, sums.n_texts)
    # Without a control, the table `control` is empty.
    control_sums = runs[1].done.sums_by_kind if len(runs) > 1 else {}
    tables["control"] = judge(control_sums.values(), thresholds, sums.n_texts)["heads"]
    corpus["effective_texts"] = max(map(effective_texts, sums.sums_by_kind.values()), default=0.0)
    # A run follows only after a complete one, so the last run says whether the study is complete and what failed.
    corpus = settle_corpus(corpus, interrupted=not runs[-1].complete)
    about = replace(runs[0], failures=runs[-1].failures).describe_run(
        model.info, _measuring_notes(model)
    )
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
    """Return the notes of the record: sentences on how this model was measured."""
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
    """Return the `options` of the record: the options of the study, and all roles and measures."""
    from attnscope.core.catalogue import measure_names

    return {
        **CRITERIA,
        "least_active": MIN_ACTIVE_SHARE,
        "chunk": options.chunk,
        "stride": options.stride,
        "block": BLOCK,
        "block_characters": MAX_BLOCK_CHARACTERS,
        "control": f"untrained, seed {options.seed}" if options.control else None,
        "roles": {name: rule.describe(thresholds[name]) for name, rule in RULES.items()},
        "measures": list(measure_names()),
    }


def add_ablation_effects(
    findings: Heads, model: Model, texts: Texts, report: ReportProgress | None
) -> Heads:
    """Ablate each head that has a role, on the first N_ABLATED_TEXTS texts, and add the effects to the table of heads.

    A head's output is replaced by zero, then by its mean. If neither has an effect, the model does not use what the
    head attends to: attention alone is no evidence of use (Jain and Wallace 2019).

    Raises:
        AttnscopeError: The model cannot be ablated.
    """
    # Ablate each kind of attention by itself, as each kind numbers its layers and heads from 0.
    heads = findings.table("heads")
    has_role = heads["role"] != ""
    role_heads = heads.select(has_role)
    first_texts = list(islice(distinct(texts, CopyFilter()), N_ABLATED_TEXTS))
    kinds = list(dict.fromkeys(role_heads["kind"].tolist()))
    ablations = []
    for number, kind in enumerate(kinds):
        pick = tuple(role_heads.select(role_heads["kind"] == kind).layer_heads)
        options = AblateOptions(choice=Choice(pick=pick), kind=kind)
        ablations.append(ablate(model, first_texts, options, scale_report(report, number, len(kinds))))
    # If no head has a role, there is nothing to add.
    if not ablations:
        return findings
    # Effects become columns of the table of heads. Heads without a role get NaN.
    ablated = Table.stack([ablation.table("heads") for ablation in ablations])
    columns = dict(heads.columns)
    columns |= {name: ablated.columns[name] for name in ablated.number_columns}
    values = dict(heads.values)
    for name, effects in ablated.values.items():
        # The columns kind, layer and head are in the table already.
        if name not in heads:
            values[name] = np.full(len(heads), np.nan)
            values[name][has_role] = effects

    # Say how effects were measured. If the model makes predictions, the table `whole` has rows (the unchanged model's
    # loss), and effects are KL divergences. Else they are changes of hidden states.
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
