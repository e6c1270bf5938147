"""An atlas in shards: merging parts into the atlas of the whole corpus.

A part holds the results of the first pass: sums, and the texts that are among the best of a head or of the
sample. Which of these the whole shows is known when all parts are there. Then the model reads them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from attnscope.corpus import CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.records.atlas.record import Atlas
from attnscope.records.heads.findings import Findings
from attnscope.studies.atlas.options import AtlasOptions
from attnscope.studies.atlas.scores import Place, ScoredText, Scores
from attnscope.studies.atlas.study import finish
from attnscope.studies.heads.merging import merge_findings
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import model_of, run_of
from attnscope.studies.inputs.texts import Report


def _scores_of(part: Atlas) -> Scores:
    """The scores that a part keeps."""
    texts = {text.index: CorpusText(**vars(text)) for text in part.kept}
    columns = [part.scores[name].tolist() for name in ("texts", "chunks", "tokens", "lots")]
    scored = tuple(ScoredText(texts[index], number, n, lot) for index, number, n, lot in zip(*columns, strict=True))
    heads: tuple[Place, ...] = tuple((head.kind, head.layer, head.head) for head in part.heads)
    return Scores(heads, scored, part.scores["values"], part.options["examples"], part.options["sample"])


def merge_atlases(
    model: Model, parts: Sequence[Atlas], names: Sequence[str] = (), report: Report | None = None
) -> Atlas:
    """The atlas of several shards of one corpus, as one run over all of it would have made it.

    Bit for bit, as `merge_findings`; the texts that it shows are read again, by the model.

    Args:
        model: The model that parts are of.
        parts: What `atlas` made of each shard; some may be missing.
        names: What to call each in errors, such as its file.
        report: Called after each batch.

    Raises:
        AttnscopeError: One is no part; or they are of different models, texts, options or measures, or a shard comes
            twice.
    """
    names = names or [f"part {number}" for number, _ in enumerate(parts, 1)]
    for part, name in zip(parts, names, strict=True):
        if not part.is_part:
            raise AttnscopeError(f"{name} is an atlas of its own, no part of one", "give what --shard wrote")
    findings = merge_findings(
        [
            Findings(part.run, part.corpus, part.options, part.heads, part.sums, descriptions=part.descriptions)
            for part in parts
        ],
        names,
    )
    _require_model_of(findings.run, model)
    facts = findings.options
    options = AtlasOptions(parts[0].rank, facts["examples"], facts["sample"], seed=facts["seed"])
    scores = [_scores_of(part) for part in parts if len(part.scores["lots"])]
    texts = {text.index: CorpusText(**vars(text)) for part in parts for text in part.kept}
    return finish(model, [*texts.values()], findings, options, reduce(Scores.merge, scores) if scores else None, report)


def _require_model_of(run: Mapping[str, Any], model: Model) -> None:
    """Refuses another model than that of the parts, and the same in another precision or by another engine."""
    name, weights = str(run["model"]), run_of(model.info)["sha256"]
    if weights != run["sha256"]:
        raise AttnscopeError(
            f"{model.info.name} is not the model of the parts: its weights differ",
            f"{name} has changed since: give what it was then with --model"
            if model.info.name == name
            else f"the parts are of {name}: give that with --model",
        )
    for what, mine, theirs in (
        ("precision", model.info.dtype, run["dtype"]), ("engine", model.info.engine, run["engine"])
    ):  # fmt: skip
        if mine != theirs:
            raise AttnscopeError(
                f"{model.info.name} is not the model of the parts: its {what} differs",
                f"load it as they were made: {theirs}",
            )


def merge_files(
    parts: Sequence[tuple[Path, Atlas]], model: str | None, loading: LoadOptions, report: Report | None
) -> Atlas:
    """Loads the model that parts name, or another name of it, and merges them."""
    run = parts[0][1].run
    how = replace(loading, dtype=str(run["dtype"]), engine=str(run["engine"]), adapter=loading.adapter)
    loaded = how.load(model or model_of(run))
    return merge_atlases(loaded, [part for _, part in parts], [str(path) for path, _ in parts], report)
