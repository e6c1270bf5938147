"""Declare the result about relations, such as from a subject to its verb: which heads attend along them.

A link is one example of a relation in a text. It leads from a source, which is the token that should attend, to its
targets. A head hits a link if the source's largest weight is on a target; its accuracy is the share of links that it
hits. A head *expresses* a relation if a test shows that its accuracy is more than a margin above the best simple rule,
such as "attend to the next word". In transcripts of recordings the only relation is from a word to its sound; a head
that expresses it can *time words*. `studies.relations` computes the result.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from attnscope.arrays import Floats
from attnscope.errors import UsageError, amount
from attnscope.options import chunk_option, option, options, stride_option
from attnscope.report.blocks import Block, Grid, Note, Ranking, Report, WordsColumn
from attnscope.report.numbers import UNDEFINED, format_fixed, largest_first, number
from attnscope.report.wording import RECORDINGS, corpus_line, list_some, printable, report_on
from attnscope.results.result import Result
from attnscope.results.table import HEADS, Array, Column, Table, count, share, text
from attnscope.results.table import number as number_column

MIN_MASS = 0.1
"""A head with a smaller mean weight on the targets expresses a relation only weakly: it mostly looks elsewhere."""

MAX_DRAWN_RELATIONS = 20
"""The most relations, as rows, in the figure of relations and heads."""

BY_BEST_HEADS = "best"
"""In the column `by` of `word_times`: words are timed by the `n_heads` most accurate heads."""

BY_UPPER_HALF = "upper half"
"""In the column `by`: words are timed by all heads in the upper half of the layers, Whisper's fallback without
`alignment_heads`."""

_ACCURACY = share("accuracy", "share of links whose source's largest weight is on a target")
_MASS = share("mass", "mean weight on the targets", short="mean weight")
_BASELINE = share("baseline", "accuracy of the best simple rule; NaN without links", short="simple rule")
_N_SCORED = count("n_scored", "links of the half that is scored", short="n", range=(0, None))

# The axes of all arrays. A CSV file has one row per relation and head.
_RELATION_HEAD_AXES = ("relations", "heads")


def _read_labels(value: str) -> tuple[str, ...]:
    """Parse the value of `--only`, relations separated by commas, such as "nsubj,obj"."""
    labels = tuple(label.strip() for label in value.split(",") if label.strip())
    if not labels:
        raise UsageError("no relation is named", "such as --only nsubj,obj")
    return labels


@options
class AnnotationOptions:
    """The options for reading annotated files."""

    kind: str = option(
        "How the files are annotated: conllu, jsonl, python; auto: by their names.",
        "--annotated-as",
        default="auto",
        panel="Text",
        rare=True,
    )
    unit: str = option(
        "How CoNLL-U is split into texts: sentence, or document (coreference across sentences).",
        "--split",
        default="sentence",
        panel="Text",
    )


@options
class RelationsOptions:
    """The options for studying relations."""

    only: tuple[str, ...] | None = option(
        "Only these relations, by label or whole name, such as nsubj,obj.  [default: all]",
        default=None,
        read=_read_labels,
    )
    chunk: int | None = chunk_option()
    stride: int | None = stride_option()


class Relations(Result):
    """Hold the accuracy of each head for each relation, the most frequent relations first.

    The texts with links of a relation are split at random into two halves. The selection half chooses the best head, by
    accuracy. The scored half then gives the accuracy of all heads, without selection bias. The baseline is the most
    accurate simple rule, such as "the next word". It is chosen on the scored half itself, which favours the rule over
    the head, so a head that passes is surely better.

    A relation has no *verdict* if it has too few examples; `no_verdict` then says so.
    """

    SCHEMA: ClassVar[str] = "attnscope.relations/3"
    TABLES: ClassVar[Mapping[str, Sequence[Column]]] = {
        "relations": (
            text("relation", "such as nsubj→parent: from the dependent to its parent"),
            count("n", "links that were measured, in both halves", range=(0, None)),
            count("n_texts", "texts that hold them", range=(0, None)),
            _N_SCORED,
            count("n_texts_scored", "texts of that half", range=(0, None)),
            text("rule", "the best simple rule, such as offset +1"),
            _BASELINE,
            text(
                "no_verdict", "why there is none, such as fewer than 20 examples; empty = there is one"
            ),
            count(
                "best",
                "the head that does best on the half that chooses it; -1 = none",
                refers_to="heads",
            ),
            count(
                "n_sources", "sources that the texts are of, such as files or documents", range=(0, None)
            ),
            text(
                "halves", "what was dealt to halves: sources, or texts where there are too few sources"
            ),
        ),
        "heads": HEADS,
        "left_out": (
            count("relation", "the relation", refers_to="relations"),
            text("reason", "why links could not be measured"),
            count("n", "how many"),
        ),
        "word_times": (
            text("by", f"how the heads are chosen: {BY_BEST_HEADS} or {BY_UPPER_HALF}"),
            count("n_heads", "how many heads", range=(0, None)),
            number_column(
                "median", "median error over recordings", "s", range=(0, None), short="median error"
            ),
            number_column(
                "mean", "mean error over recordings", "s", range=(0, None), short="mean error"
            ),
            number_column(
                "change", "median difference to the error of the upper half", "s", short="to upper half"
            ),
        ),
    }
    CSV: ClassVar[tuple[str, ...]] = _RELATION_HEAD_AXES
    ARRAYS: ClassVar[Sequence[Array]] = (
        Array(
            "choice",
            "accuracy on the half that chooses the head",
            "share",
            (0, 1),
            axes=_RELATION_HEAD_AXES,
        ),
        Array("accuracy", "accuracy on the other half", "share", (0, 1), axes=_RELATION_HEAD_AXES),
        Array(
            "mass",
            "mean weight on the targets, on the other half",
            "share",
            (0, 1),
            axes=_RELATION_HEAD_AXES,
        ),
        Array(
            "p",
            "one-sided p-value against the baseline; NaN without a verdict",
            range=(0, 1),
            axes=_RELATION_HEAD_AXES,
        ),
        Array(
            "q",
            "the same after Benjamini-Hochberg over heads x relations",
            range=(0, 1),
            axes=_RELATION_HEAD_AXES,
        ),
        Array("found", "whether the head expresses the relation", kind="flag", axes=_RELATION_HEAD_AXES),
    )

    def row(self, relation: str) -> int:
        """Return the row of a relation in its table and in the arrays.

        Raises:
            KeyError: There is no such relation.
        """
        names: list[str] = self.table("relations")["relation"].tolist()
        if relation not in names:
            raise KeyError(relation)
        return names.index(relation)

    def at_heads(self, name: str, heads: Sequence[int]) -> Floats:
        """Return the values of the array `name` at one head per relation, (relation,).

        `heads` has for each relation a row of the table `heads`; -1 = no head, which gives NaN.
        """
        if not len(self.table("heads")):
            return np.full(len(heads), np.nan)
        # NumPy reads index -1 as the last head. `where` replaces that value by NaN.
        values = self.grids[name].astype(np.float64)[np.arange(len(heads)), heads]
        return np.where(np.array(heads) < 0, np.nan, values)

    def at_best(self, name: str) -> Floats:
        """Return the value of the array `name` at the best head of each relation, (relation,); NaN if it has none."""
        return self.at_heads(name, self.table("relations")["best"].tolist())

    @property
    def verdicts(self) -> list[str]:
        """Return for each relation, as one word, whether its best head expresses it.

        "yes": the best head does.
        "weakly": the best head does, with a mean weight below `MIN_MASS` on the targets.
        "others": the best head does not, but other heads do.
        "no": no head does.
        "none": there are too few examples for a verdict.
        """
        best_expresses = self.at_best("found") == 1
        # `select` takes the first case that is true, and "no" if none is. Arrays are (relation,).
        cases = {
            "none": self.table("relations")["no_verdict"] != "",
            "weakly": best_expresses & (self.at_best("mass") < MIN_MASS),
            "yes": best_expresses,
            "others": self["found"].any(1),
        }
        verdicts: list[str] = np.select([*cases.values()], [*cases], "no").tolist()
        return verdicts

    def expressing_heads(self, row: int) -> list[int]:
        """Return the heads that express the relation in this row, the most accurate first."""
        order = largest_first(self["accuracy"][row])
        return [head for head in order if self["found"][row, head]]

    @property
    def shown_heads(self) -> list[int]:
        """Return for each relation the head to show, as a row of the table `heads`; -1 = no head was chosen.

        The shown head is the best head. If only other heads express the relation, it is the most accurate of these.
        """
        heads: list[int] = self.table("relations")["best"].tolist()
        for row, verdict in enumerate(self.verdicts):
            if verdict == "others":
                heads[row] = self.expressing_heads(row)[0]
        return heads

    @property
    def ranked(self) -> list[int]:
        """Return the row numbers of relations, sorted by their verdict, from "yes" to "none".

        "yes" and "weakly" are one group. Within a group, relations are sorted by how far the best head is above the
        baseline, the furthest first. The low end of the accuracy's interval counts, so that uncertain relations sink.
        """
        group = {"yes": 0, "weakly": 0, "others": 1, "no": 2, "none": 3}
        groups = [group[verdict] for verdict in self.verdicts]
        above = self.at_best("accuracy_low") - self.table("relations")["baseline"]
        # `lexsort` sorts by its last key first, and puts NaN last.
        order: list[int] = np.lexsort((-above, groups)).tolist()
        return order

    @property
    def is_of_recordings(self) -> bool:
        """Return whether the texts are transcripts of recordings."""
        return self.corpus.get("of") == RECORDINGS

    @property
    def alignment_heads(self) -> list[list[int]] | None:
        """Return [layer, head] of each head that expresses the relation from words to sounds, and not weakly.

        None = the texts are not transcripts of recordings.

        The form is that of `alignment_heads` in Whisper's generation_config.json, from which transformers, CTranslate2
        and faster-whisper take the heads to time words by.

        Source: transformers 5, models/whisper/generation_whisper.py.
        """
        if not self.is_of_recordings:
            return None
        # (head,): the only relation is from words to sounds, so `any` over relations keeps its values.
        follows_words = (self["found"] & (self["mass"] >= MIN_MASS)).any(0)
        return [list(pair) for pair in self.table("heads").select(follows_words).layer_heads]

    def describe(self) -> dict[str, Any]:
        """Return the JSON header of the result, without the values of columns and arrays, with `alignment_heads`."""
        description = super().describe()
        if self.alignment_heads is not None:
            description["alignment_heads"] = self.alignment_heads
        return description

    def find_listed_rows(self, **shown: Any) -> list[int]:
        """Return the rows of files, one per relation and head, of the relations that the terminal lists."""
        heads = self.shown_heads
        listed = self.ranked[: Ranking.n_printed]
        return [row * len(self.table("heads")) + heads[row] for row in listed if heads[row] >= 0]

    def report(self, **shown: Any) -> Report:
        """Return the report: the heads that express relations. For recordings, heads that time words come first.

        `shown`, which other kinds of results read, is ignored.
        """
        answer = [_count_expressed(self), *_explain_test(self)]
        blocks = [_rank_relations(self)]
        if self.is_of_recordings and len(self.table("relations")):
            answer = _write_word_answer(self)
            blocks = [*_yield_paste_lines(self), *blocks]
        subtitle = f"{_count_expressed(self)} · {corpus_line(self)}"
        return report_on(
            self,
            answer,
            [*blocks, _draw_map(self)],
            _explain_numbers(self),
            subtitle=subtitle,
            notes=_write_notes(self),
        )


# Blocks


def name_heads(result: Relations, heads: Sequence[int]) -> list[str]:
    """Return the names of heads, such as "L3H1", by their rows in the table `heads`; "–" for -1, no head."""
    # UNDEFINED, "–", is put last, so that index -1 reads it.
    name_by_row = [*result.table("heads").head_names(), UNDEFINED]
    return [name_by_row[head] for head in heads]


def _rank_relations(result: Relations) -> Block:
    """Rank relations, each with its shown head and its verdict."""
    relations = result.table("relations")
    heads = result.shown_heads
    table = Table.of_arrays(
        (_ACCURACY, _BASELINE, _N_SCORED, _MASS),
        accuracy=result.at_heads("accuracy", heads),
        accuracy_low=result.at_heads("accuracy_low", heads),
        accuracy_high=result.at_heads("accuracy_high", heads),
        baseline=relations["baseline"],
        n_scored=relations["n_scored"],
        mass=result.at_heads("mass", heads),
    )
    return Ranking(
        header="query→key",
        noun="relation",
        names=relations["relation"].tolist(),
        table=table,
        columns=[
            WordsColumn("head", name_heads(result, heads)),
            "accuracy",
            "baseline",
            WordsColumn("expressed", describe_verdicts(result), wraps=True),
            "n_scored",
            "mass",
            WordsColumn("rule", relations["rule"].tolist()),
        ],
        order=result.ranked,
    )


def describe_verdicts(result: Relations) -> list[str]:
    """Describe for each relation whether its shown head expresses it, such as "yes; also L0H1, L0H2"."""
    names = result.table("heads").head_names()
    texts = []
    for row, (verdict, shown_head) in enumerate(zip(result.verdicts, result.shown_heads, strict=True)):
        others = [names[head] for head in result.expressing_heads(row) if head != shown_head]
        # If the verdict is "others", the shown head is one of those others, so it does express the relation.
        text = {"none": "too few", "others": "yes"}.get(verdict, verdict)
        if others and text != "no":
            text += f"; also {list_some(others, 2)}"
        texts.append(text)
    return texts


def _draw_map(result: Relations) -> Block:
    """Draw how far each head is above the best simple rule; a frame marks heads that express the relation."""
    rows = result.ranked[:MAX_DRAWN_RELATIONS]
    # (relation, head)
    excess = result["accuracy"] - result.table("relations")["baseline"][:, None]
    n_left_out = len(result.ranked) - len(rows)
    notes = [
        "colour: accuracy above the best simple rule, 0 where below it; frame: the head expresses the relation"
    ]
    if n_left_out:
        notes.append(f"not shown: {amount(n_left_out, 'more relation')}")
    return Grid(
        figure="relations",
        title="which heads express which relations",
        printed="never",
        values=np.maximum(excess[rows], 0.0),
        rows=result.table("relations")["relation"][rows].tolist(),
        columns=result.table("heads").head_names(),
        framed_cells=result["found"][rows],
        notes=notes,
    )


# Recordings


def _write_word_answer(result: Relations) -> list[str]:
    """Write which head attends from words to their sounds, and how exactly such heads time words."""
    # Recordings have one relation, the first row: from a word to its sound.
    relation = result.table("relations").as_dicts()[0]
    verdict = result.verdicts[0]
    [best_head] = name_heads(result, [relation["best"]])
    if verdict == "others":
        [shown_head] = name_heads(result, result.shown_heads)
        return [f"{best_head} was chosen, but {shown_head} follows the words surely"]
    if verdict != "yes":
        reason = f": {relation['no_verdict']}" if relation["no_verdict"] else ""
        return [f"No head follows the words surely enough to time them by{reason}"]
    # Compare the accuracy of the best head with the best simple rule.
    low = number(result.at_best("accuracy_low")[0])
    high = number(result.at_best("accuracy_high")[0])
    accuracy = f"{result.at_best('accuracy')[0]:.0%} of them right [{low}, {high}]"
    rule_accuracy = f"by {printable(relation['rule'])} {number(relation['baseline'])}"
    answer = [f"{best_head} follows the words: {accuracy}; {rule_accuracy}"]
    # Compare the timing error of `alignment_heads` with that of the upper half of the layers.
    times = result.table("word_times")
    if len(times):
        n_heads = len(result.alignment_heads or ())
        # `word_times` also has a row for the best head alone: take the row with all alignment heads.
        is_same_number = (times["by"] == BY_BEST_HEADS) & (times["n_heads"] == n_heads)
        error = format_fixed(times["median"][is_same_number][0], 3)
        upper_error = format_fixed(times["median"][times["by"] == BY_UPPER_HALF][0], 3)
        subject = f"Its {amount(n_heads, 'head')} time" if n_heads > 1 else "It times"
        answer.append(f"{subject} words within {error} s; the upper half within {upper_error} s")
    return answer


def _yield_paste_lines(result: Relations) -> Iterator[Block]:
    """Yield the heads that follow the words as a line for generation_config.json and as a command."""
    heads = result.alignment_heads
    if not heads:
        return
    names = ",".join(f"L{layer}H{head}" for layer, head in heads)
    yield Note(
        lines=[
            f'"alignment_heads": {json.dumps(heads)}',
            f"attnscope heatmap --audio FILE --words --pick {names}",
        ],
        notes=[
            "paste the first line into the model's generation_config.json; or time words by the second"
        ],
    )


# Sentences


def _count_expressed(result: Relations) -> str:
    """Write how many relations some head expresses, and how many have too few examples."""
    verdicts = result.verdicts
    n_without = verdicts.count("none")
    n_tested = len(verdicts) - n_without
    if verdicts and not n_tested:
        return f"{amount(n_without, 'relation')}, and too few examples for any verdict"
    n_expressed = n_tested - verdicts.count("no")
    tested = amount(n_tested, "relation")
    too_few = f"; {n_without} more have too few examples" if n_without else ""
    return f"{n_expressed} of {tested} expressed by some head, which looks from one word to the other{too_few}"


def _explain_test(result: Relations) -> list[str]:
    """Explain accuracy and the test for expressing a relation, in one line; no line if no relation was measured."""
    if not len(result.table("relations")):
        return []
    margin = result.options.get("margin", 0.1)
    return [
        "accuracy: how often the head's largest weight is on the right word; expressed: more than "
        f"{margin:g} above the best simple rule (such as the word before), by a test at a false discovery rate of 5%"
    ]


def _explain_numbers(result: Relations) -> list[str]:
    """Explain how heads are chosen and scored, and which simple rules they are compared with."""
    # Cross-attention has other positions for queries and keys, so its rules also compare relative positions.
    rules = "a fixed offset in words, or the same word"
    if "cross" in result.table("heads")["kind"]:
        rules = "the same place or an offset in words, the diagonal, or the same word"
    return [
        "one half of the texts chooses the head, the other half scores it; where the chosen one does not pass, the "
        "most accurate head that does is shown",
        f"simple rule: accuracy of the best one there ({rules})",
    ]


def _write_notes(result: Relations) -> list[str]:
    """Write footnotes that explain the columns n and mass, and unusual verdicts."""
    notes = ["n: links of the half that is scored; mass: mean weight on the targets"]
    reasons = sorted({*result.table("relations")["no_verdict"].tolist()} - {""})
    if reasons:
        notes.append(f"too few: {' or '.join(reasons)}")
    if "weakly" in result.verdicts:
        notes.append(f"weakly: with less than {MIN_MASS:g} of its attention on the targets")
    return notes
