"""From sums to findings, and from the findings of shards to those of the whole. Needs no model and no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from attnscope.errors import AttnscopeError
from attnscope.records.ablation import Effect
from attnscope.records.frame.shards import COUNTS, is_interrupted, is_part, settle_corpus
from attnscope.records.heads.findings import Findings
from attnscope.studies.heads.roles import effective_texts, judge
from attnscope.studies.measuring.tally import Tally, tallies_of

_LATER = ("causal", "replaced", "quantities")
"""Options that say how a step after the measures was made: a part may have had it by itself."""

_CONTROL = "control-"
_PREFIXES = ("", _CONTROL)
"""What the names of sums begin with: those of the model itself, and of its control."""

Arrays = Mapping[str, NDArray[Any]]


def sums_of(trained: Mapping[str, Tally], control: Mapping[str, Tally]) -> dict[str, NDArray[Any]]:
    """The state of tallies by kind, as a record holds it."""
    return _sums_under("", trained) | _sums_under(_CONTROL, control)


def conclude(run: Mapping[str, Any], corpus: Mapping[str, Any], options: Mapping[str, Any], sums: Arrays) -> Findings:
    """The findings that sums amount to.

    The thresholds of roles are read from `options`; `sums` are what `sums_of` returned.

    Raises:
        KeyError: A sum or a threshold is missing.
        ValueError: The sums are damaged.
    """
    thresholds = {name: float(role["threshold"]) for name, role in options["roles"].items()}
    n_texts = int(corpus["n_texts"])
    trained, control = (_tallies_under(prefix, sums) for prefix in _PREFIXES)
    effective = max(map(effective_texts, trained.values()), default=0.0)
    return Findings(
        run=run,
        corpus={**corpus, "effective_texts": effective},
        options=options,
        heads=judge(list(trained.values()), thresholds, n_texts),
        sums=sums,
        control=judge(list(control.values()), thresholds, n_texts),
    )


def _sums_under(prefix: str, tallies: Mapping[str, Tally]) -> dict[str, NDArray[Any]]:
    """The state of tallies by kind, with a prefix before each name."""
    return {prefix + name: array for tally in tallies.values() for name, array in tally.to_arrays().items()}


def _tallies_under(prefix: str, sums: Arrays) -> dict[str, Tally]:
    """The tallies that `_sums_under` wrote, by kind."""
    arrays = {}
    for name, array in sums.items():
        own = next((other for other in _PREFIXES if other and name.startswith(other)), "")
        if own == prefix:
            arrays[name.removeprefix(prefix)] = array
    return tallies_of(arrays)


def merge_findings(parts: Sequence[Findings], names: Sequence[str] = ()) -> Findings:
    """The findings of several shards of one corpus, as one run over all of it would have found them.

    They agree within the last digits: how texts are split changes how sums are rounded. What changes without heads
    (`with_effects`) is of the first texts of the whole corpus, whatever the shard: each head keeps what the first part
    says that says anything of it.

    Args:
        parts: What `heads` found on each shard; some may be missing.
        names: What to call each in errors, such as its file.

    Raises:
        AttnscopeError: They are of different models, texts, options or measures, or a shard comes twice.
    """
    if not parts:
        raise AttnscopeError("there is nothing to merge", "give the records of shards")
    names = names or [f"part {number}" for number, _ in enumerate(parts, 1)]
    for part, name in zip(parts, names, strict=True):
        if part.of_senses:
            raise AttnscopeError(
                f"{name} is of {part.corpus['of']}, which are not merged", "study all of them in one run"
            )
        if not is_part(part.corpus):
            raise AttnscopeError(f"{name} is no part of a study over a corpus", "give what heads --shard wrote")
    for part, name in zip(parts, names, strict=True):
        _require_alike((parts[0], names[0]), (part, name))
    _require_apart(parts, names)
    ordered = sorted(parts, key=lambda part: _shard(part.corpus["shards"][0]))
    tallies: dict[str, dict[str, Tally]] = {prefix: {} for prefix in _PREFIXES}
    for part, name in zip(parts, names, strict=True):
        try:
            for prefix, whole_tallies in tallies.items():
                for kind, tally in _tallies_under(prefix, part.sums).items():
                    whole_tallies[kind] = whole_tallies[kind].merge(tally) if kind in whole_tallies else tally
        except (KeyError, ValueError, OverflowError) as error:
            raise AttnscopeError(f"{name} is damaged: {error}", "make this part again") from None
    run = ordered[0].run
    sums = sums_of(tallies[""], tallies[_CONTROL])
    whole = conclude(run, _join([part.corpus for part in ordered]), parts[0].options, sums)
    # Descriptions are of texts drawn from the whole corpus, whatever the shard: all parts say the same.
    described = next((part.descriptions for part in ordered if part.descriptions is not None), None)
    return _with_effects(replace(whole, descriptions=described), ordered)


def _with_effects(whole: Findings, parts: Sequence[Findings]) -> Findings:
    """The findings with what their parts say of heads that were taken out, and how that was measured."""
    effects: dict[tuple[str, int, int], Mapping[str, Effect]] = {}
    for part in parts:
        for head in part.heads:
            if head.effects:
                effects.setdefault((head.kind, head.layer, head.head), head.effects)
    options = {name: part.options[name] for part in reversed(parts) for name in _LATER if part.options.get(name)}
    if not options:
        return whole
    return replace(
        whole,
        heads=tuple(replace(head, effects=effects.get((head.kind, head.layer, head.head), {})) for head in whole.heads),
        options={**whole.options, **options},
    )


def _require_alike(first: tuple[Findings, str], other: tuple[Findings, str]) -> None:
    """Refuses two parts that cannot be of one whole; the message says which and why."""
    (a, a_name), (b, b_name) = first, other
    for what, value_of in _COMPARED:
        of_a, of_b = value_of(a), value_of(b)
        if of_a != of_b:
            values = "" if isinstance(of_a, Mapping | list) else f" ({_short(of_a)} and {_short(of_b)})"
            raise AttnscopeError(
                f"{a_name} and {b_name} are of different {what}{values}", "merge shards of one run over one corpus"
            )
    if not a.corpus.get("sha256"):
        raise AttnscopeError(
            f"{a_name} was interrupted before it had seen all texts: whose part it is cannot be told",
            "make this part again",
        )


def _measures(part: Findings) -> list[Any]:
    """Which quantities the sums are of; a shard without any text has none."""
    named = [name for name in part.sums if name.endswith((".names", ".layers"))]
    return [(name, part.sums[name].tolist()) for name in sorted(named)]


_COMPARED: tuple[tuple[str, Callable[[Findings], Any]], ...] = (
    ("models", lambda part: part.run.get("sha256") or part.run.get("model")),
    ("precisions", lambda part: part.run.get("dtype")),
    ("engines", lambda part: part.run.get("engine")),
    ("versions of attnscope", lambda part: part.run.get("versions", {}).get("attnscope")),
    ("texts", lambda part: part.corpus.get("sha256")),
    # Heads may have been taken out after some parts alone.
    ("options", lambda part: {name: one for name, one in part.options.items() if name not in _LATER}),
)


def _require_apart(parts: Sequence[Findings], names: Sequence[str]) -> None:
    """Refuses a shard that comes twice, a corpus that was divided twice, and measures that differ."""
    whose: dict[str, str] = {}
    divisions: dict[int, str] = {}
    measured: tuple[str, list[Any]] | None = None
    for part, name in zip(parts, names, strict=True):
        for shard in part.corpus["shards"]:
            if shard in whose:
                raise AttnscopeError(f"{whose[shard]} and {name} hold the same shard, {shard}", "give each part once")
            whose[shard] = name
            divisions.setdefault(_shard(shard)[1], name)
        measures = _measures(part)
        if measures and measured and measures != measured[1]:
            raise AttnscopeError(
                f"{measured[0]} and {name} are of different measures", "merge shards of one run over one corpus"
            )
        measured = measured or ((name, measures) if measures else None)
    if len(divisions) > 1:
        (a, a_name), (b, b_name) = list(divisions.items())[:2]
        raise AttnscopeError(
            f"{a_name} is a shard of {a}, {b_name} of {b}: they overlap", "divide the corpus once, such as 1/2 and 2/2"
        )


def _join(corpora: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the whole was made on, from what its parts were made on, in the order of shards."""
    shards = sorted((shard for corpus in corpora for shard in corpus["shards"]), key=_shard)
    whole = len(shards) == _shard(shards[0])[1]
    problems = [problem for corpus in corpora for problem in corpus.get("problems", ())]
    whole_corpus = dict(corpora[0]) | {
        **{name: sum(corpus[name] for corpus in corpora) for name in COUNTS},
        "shards": ["1/1"] if whole else shards,
        # Of one corpus all parts list the same; but each what its workers have lost.
        "problems": [problem for number, problem in enumerate(problems) if problem not in problems[:number]],
        "interrupted": any(map(is_interrupted, corpora)),
    }
    return settle_corpus(whole_corpus)


def _shard(name: str) -> tuple[int, int]:
    number, _, of = name.partition("/")
    return int(number), int(of)


def _short(value: Any) -> str:
    return str(value)[:12] or "none"
