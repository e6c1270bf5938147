"""An atlas in shards: what a part keeps of its texts, and the atlas of the whole that several parts make.

A part holds what the first pass came to: exact sums, and the texts that are among the best of a head or of the sample.
Which of these the whole shows is known when all parts are there: then the model reads them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from attnscope.corpus import CorpusText
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.records.atlas.record import Atlas
from attnscope.records.heads.findings import Findings
from attnscope.studies.atlas.options import AtlasOptions
from attnscope.studies.atlas.scores import Place, ScoredText, Scores
from attnscope.studies.atlas.study import finish
from attnscope.studies.heads.merging import merge_findings
from attnscope.studies.heads.options import HeadsOptions
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.provenance import model_of, run_of
from attnscope.studies.inputs.texts import Report


def _scores_of(part: Atlas) -> Scores:
    """The scores that a part keeps."""
    texts = {text.index: CorpusText(**vars(text)) for text in part.kept}
    held = [part.scores[name].tolist() for name in ("texts", "chunks", "tokens", "lots")]
    scored = tuple(ScoredText(texts[index], number, n, lot) for index, number, n, lot in zip(*held, strict=True))
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
    found = merge_findings(
        [
            Findings(part.run, part.corpus, part.options, part.heads, part.sums, descriptions=part.descriptions)
            for part in parts
        ],
        names,
    )
    for name, mine, known in (
        ("weights", run_of(model.info)["sha256"], found.run["sha256"]),
        ("precision", model.info.dtype, found.run["dtype"]),
        ("engine", model.info.engine, found.run["engine"]),
    ):
        if mine != known:
            wanted, given = str(found.run["model"]), model.info.name
            raise AttnscopeError(
                f"{given} is not the model of the parts: its {name} {'differ' if name == 'weights' else 'differs'}",
                f"load it as they were made: {known}"
                if name != "weights"
                else f"{wanted} has changed since: give what it was then with --model"
                if given == wanted
                else f"the parts are of {wanted}: give that with --model",
            )
    settings = found.options
    cut = HeadsOptions(chunk=settings["chunk"], stride=settings["stride"])
    options = AtlasOptions(parts[0].rank, settings["examples"], settings["sample"], cut, settings["seed"])
    scores = [_scores_of(part) for part in parts if len(part.scores["lots"])]
    texts = {text.index: CorpusText(**vars(text)) for part in parts for text in part.kept}
    return finish(model, [*texts.values()], found, options, reduce(Scores.merge, scores) if scores else None, report)


def merge_files(
    parts: Sequence[tuple[Path, Atlas]], model: str | None, loading: LoadOptions, report: Report | None
) -> Atlas:
    """Loads the model that parts name, or another name of it, and merges them.

    Raises:
        AttnscopeError: As of `merge_atlases`; the model cannot be loaded.
    """
    run = parts[0][1].run
    how = replace(loading, dtype=str(run["dtype"]), engine=str(run["engine"]), adapter=loading.adapter)
    loaded = how.load(model or model_of(run))
    return merge_atlases(loaded, [part for _, part in parts], [str(path) for path, _ in parts], report)
