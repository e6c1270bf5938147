"""Say in one line what each head does, and list the evidence for it.

A line joins the head's roles and its description, such as "previous token: the previous token (69%; uniform 34%); then
nouns 1.6× (door, key); rests 24% on [CLS]". Here the only role is "previous token", with a colon after it.

The description is a series of terms, the strongest first. Here the first term says: 69% of the attention goes to the
previous token, where uniform attention would give it 34%. The second term says: nouns, such as door and key, get 1.6
times what the first term predicts. Then the description names the head's sinks: keys such as [CLS], to which the head
attends when it has nothing to do.

`studies.describe` fits descriptions on half of the texts. "KL explained" is the share of the KL divergence between the
head's attention and uniform attention that the line predicts on the other half.

`questions.heads` and `questions.atlas` report these lines.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attnscope.arrays import Floats
from attnscope.errors import amount, require_choice
from attnscope.questions.head_roles import SINK_ROLES, RoleGrid, choose_result_marks
from attnscope.report.blocks import Block, CustomBlock, Note, Ranking, WordsColumn, rank_heads
from attnscope.report.numbers import format_percent, format_with_interval, largest_first, q_value
from attnscope.report.plain_text import cut
from attnscope.report.wording import label, printable
from attnscope.results.result import Result
from attnscope.results.table import Table
from attnscope.results.table import number as number_column

SORTS = ("layer", "explained", "entropy")
"""The values of --sort: heads in the order of the model, the best explained first, or the lowest entropy first."""

MIN_NATS_TO_EXPLAIN = 0.1
"""If a head's KL from uniform attention is below this, in nats, there is nothing to explain: it is almost uniform."""

MAX_INTERVAL_WIDTH = 0.5
"""If the interval of an explained share is wider than this, the texts are too few to tell that share."""

_MAX_INFORMATIVE_HEADS = 10
"""How many heads are listed at most if the user chose neither heads nor an order: those with most to say."""

_MAX_SORTED_HEADS = 20
"""How many heads are listed at most, without --all, in an order that the user chose."""

_MAX_SHORT_LETTERS = 36
"""How many letters a short line has at most. Lists have short lines, and --all prints the full lines."""

_BRACKETED_SHARES = re.compile(r" \((\d+%; uniform )?\d+%\)")
"""Matches the shares of attention, which a short line leaves out, such as " (69%; uniform 34%)"."""

_CUT_POINTS = re.compile(r"(?<=[,;]) (?![^(]*\))")
"""Matches the blanks at which a line may be cut: after a comma or semicolon outside brackets.

In "nouns 1.6× (door, key); rests 24% on [CLS]" that is the blank before "rests", not the one before "key".
"""

_TERM_SEPARATOR = re.compile(r"; (?:then|equally) ")
"""Matches the words between two terms: the next term is weaker ("then") or as strong ("equally")."""

_ONE_DISTANCE_ROLES = ("previous token", "next token", "self token")
"""Roles of heads that attend at one distance between query and key, such as 1 for the previous token.

The first term of such a head's description names the same distance, so a short line leaves the term out.
"""


def yield_line_blocks(result: Result, sort: str | None, *, is_chosen: bool) -> Iterator[Block]:
    """Yield the blocks that list heads, each with its line: a short list, then with --all every head and its roles.

    Args:
        result: The result; its table "heads" holds only the heads to show.
        sort: One of `SORTS`; None = a short list of the heads with most to say.
        is_chosen: Whether the user picked heads. Each picked head is listed with its full line.
    """
    heads = result.table("heads")
    order = order_heads(result, sort)
    columns: list[str | WordsColumn] = []
    # The effect of ablating a head comes first, under the name of its quantity.
    effect_column = _find_effect_column(result)
    if effect_column:
        columns.append(effect_column)
    # A column that is empty for every head is left out.
    for words_column in (
        WordsColumn("value [interval]", _format_role_values(result)),
        WordsColumn("KL explained", _format_explained_shares(heads)),
    ):
        if any(words_column.texts):
            columns.append(words_column)
    full_lines = []
    short_lines = []
    for head in range(len(heads)):
        full_line, short_line = _make_lines(heads, head)
        full_lines.append(full_line)
        short_lines.append(short_line)
    full_columns = [WordsColumn("what it does", full_lines, wraps=True), *columns]
    if is_chosen:
        yield rank_heads(result, full_columns, order, n_printed=len(order))
    else:
        # First a list of short lines. The full lines follow with --all.
        columns.insert(0, WordsColumn("what it does", short_lines))
        if sort == "entropy" and "entropy_nats" in heads:
            columns.insert(0, "entropy_nats")
        # Without --sort the list holds only the heads with most to say. With --sort it holds all heads, of which the
        # terminal prints the first `_MAX_SORTED_HEADS`.
        listed_heads = order
        if sort is None:
            listed_heads = largest_first(_score_heads(result), _MAX_INFORMATIVE_HEADS)
        yield rank_heads(result, columns, listed_heads, n_printed=_MAX_SORTED_HEADS)
        yield _suggest_command(result, len(order) - len(listed_heads))
        yield rank_heads(
            result,
            full_columns,
            order,
            heading="every head",
            printed="with --all",
            # No row of its own without --all: the list above has chosen them, see `Report.find_listed_rows`.
            n_printed=0,
        )
    # The first role of each head as a grid of letters, then the numbers behind all roles.
    if len(result.table("roles")):
        role_grid = RoleGrid(result)
        yield CustomBlock(
            heading="first role of each head", printed="with --all", figure="roles", view=role_grid
        )
        yield _rank_evidence(result)


def _score_heads(result: Result) -> Floats:
    """Return how much there is to say of each head, (head,), by which the list is ordered.

    With descriptions it is the nats per query that the description predicts; without, the largest value of its roles.
    """
    heads = result.table("heads")
    if is_described(result):
        # Explained share × KL outside sinks × share of attention outside sinks.
        nats: Floats = np.maximum(heads["kl_explained"], 0) * heads["nats"] * heads["active_share"]
        return np.nan_to_num(nats)
    # Values of roles are 0 or more. Below them rank heads with only uninformative roles (sinks, diffuse), at -0.5, then
    # heads without a role, at -1.
    role_values = np.where(heads["role"] == "", -1.0, -0.5)
    roles = result.table("roles")
    is_informative = ~np.isin(roles["role"], (*SINK_ROLES, "diffuse"))
    # Give each head, (head,), the largest value of its informative roles; `fmax` ignores NaN.
    np.fmax.at(role_values, roles["head"][is_informative], roles["value"][is_informative])
    return role_values


def _suggest_command(result: Result, n_unlisted_heads: int) -> Note:
    """Say how many heads are not listed, and which command to run next."""
    lines = [f"… {n_unlisted_heads} more with --all"] if n_unlisted_heads else []
    # The command can only name files. `sources` holds the names of files, which have a dot; or, for texts from no file,
    # only the word "texts".
    file_names = [str(source) for source in result.corpus.get("sources") or () if "." in str(source)]
    model = result.run.get("model")
    # The default model, under either of its names, needs no option.
    model_option = "" if model in (None, "minilm", "all-MiniLM-L6-v2") else f" -m {printable(model)}"
    # Decoders without induction on plain text may show it on repeated text.
    attention_kinds = {*result.table("heads")["kind"].tolist()}
    if (
        attention_kinds == {"decoder"}
        and "induction" not in result.table("roles")["role"]
        and file_names
    ):
        lines.append(
            f"next, heads that repeat what came before: attnscope heads --probe repeat{model_option}"
        )
    elif file_names:
        lines.append(
            f"next, the texts behind each line: attnscope atlas --file {printable(file_names[0])}{model_option}"
        )
    return Note(lines=lines)


def _make_lines(heads: Table, head: int) -> tuple[str, str]:
    """Return the full line of a head, and a short line of at most `_MAX_SHORT_LETTERS` letters.

    A head without a description has two equal lines, which name all its roles.
    """
    role_names = [name for name in str(heads["role"][head]).split("+") if name]
    description = str(heads["description"][head]) if "description" in heads else ""
    if not description:
        role_text = ", ".join(map(label, role_names)) or "unclassified"
        return role_text, role_text
    # The description names the sinks, so sink roles are left out.
    role_labels = [label(name) for name in role_names if name not in SINK_ROLES]
    full_line = printable(description, 1000)
    # "!" precedes the first term that the other half of the texts gives, if it differs.
    other_half = str(heads["other_half"][head])
    if other_half:
        full_line += f" ! {printable(other_half, 200)}"
    short_description = _BRACKETED_SHARES.sub("", str(heads["summary"][head])) or description
    if not role_labels:
        return full_line, _join_fitting(_CUT_POINTS.split(short_description), _MAX_SHORT_LETTERS)
    return f"{', '.join(role_labels)}: {full_line}", _make_short_line(role_labels[0], short_description)


def _make_short_line(role: str, description: str) -> str:
    """Return a role and as much of a short description as fits, without a term that repeats the role."""
    if role in _ONE_DISTANCE_ROLES:
        # "the previous token; then nouns" becomes "nouns": the role names the distance already.
        description = " ".join(_TERM_SEPARATOR.split(description)[1:])
        if not description:
            return role
    parts = _CUT_POINTS.split(description)
    # Two letters are for the ": " after the role.
    max_letters = _MAX_SHORT_LETTERS - len(role) - 2
    # Nothing but the role fits with the two letters of " …": write "previous token …", which says that there is more.
    if role in _ONE_DISTANCE_ROLES and len(parts[0]) > max_letters - 2:
        return f"{role} …"
    # A description such as "the first token and nouns" repeats the role "first token": write the description alone.
    if description.startswith(f"the {role}"):
        return _join_fitting(parts, _MAX_SHORT_LETTERS)
    fitting_parts = _join_fitting(parts, max_letters)
    return f"{role}: {fitting_parts}" if fitting_parts else role


def _join_fitting(parts: Sequence[str], max_letters: int) -> str:
    """Join as many parts of a line as fit into `max_letters` letters, with " …" if any part is left out.

    A first part that is too long is cut: it loses its examples, such as " (door, key)", before it loses words.
    """
    # Two letters are for the " …".
    max_letters -= 2
    line, *other_parts = parts
    if len(line) > max_letters:
        line = cut(re.sub(r" \([^)]*\)", "", line), max_letters, at_word=True)
    for part in other_parts:
        longer_line = f"{line} {part}"
        if len(longer_line) > max_letters:
            return line.rstrip(",;…") + " …"
        line = longer_line
    return line.rstrip(",;")


def _format_role_values(result: Result) -> list[str]:
    """Return the value of each head's strongest role, with its interval, such as "0.63 [0.60, 0.65]*".

    Sink roles do not count. The text is empty for a head without another role. The mark "*" stands for a measure of
    attention outside sinks.
    """
    texts_by_head = [""] * len(result.table("heads"))
    roles = result.table("roles")
    # (value, low, high) of each role, (role, 3).
    intervals = roles.interval("value")
    # Roles of a head come strongest first, so the first one that is no sink role gives the text.
    for role_row, head in enumerate(roles["head"].tolist()):
        if texts_by_head[head] or roles["role"][role_row] in SINK_ROLES:
            continue
        # Measures of attention outside sinks have names that end in "_active", such as "induction_active".
        mark = "*" if roles["measure"][role_row].endswith("_active") else ""
        tentative = " tentative" if roles["tentative"][role_row] else ""
        texts_by_head[head] = format_with_interval(intervals[role_row]) + mark + tentative
    return texts_by_head


def _format_explained_shares(heads: Table) -> list[str]:
    """Return the KL explained of each head, such as "68% [35, 84]", or "68% ?" without an interval.

    The text is empty for a head that has nothing to explain.
    """
    texts_by_head = [""] * len(heads)
    if "kl_explained" not in heads:
        return texts_by_head
    shares = heads.interval("kl_explained").tolist()
    # Shares are (head, 3): value, low and high. Almost uniform attention leaves nothing to explain.
    for head in np.flatnonzero(heads["nats"] >= MIN_NATS_TO_EXPLAIN).tolist():
        explained, low, high = shares[head]
        if math.isnan(low):
            texts_by_head[head] = f"{format_percent(explained)} ?"
        else:
            low_percent = max(round(100 * low), 0)
            high_percent = max(round(100 * high), 0)
            texts_by_head[head] = f"{format_percent(explained)} [{low_percent}, {high_percent}]"
    return texts_by_head


def _find_effect_column(result: Result) -> str:
    """Return the name of the column of zero-ablation effects (`heads --causal`), such as "zero_loss".

    It is empty if no head was ablated.
    """
    ablation = result.options.get("causal")
    column_name = f"zero_{ablation.get('quantity')}" if isinstance(ablation, Mapping) else ""
    return column_name if column_name in result.table("heads") else ""


def _rank_evidence(result: Result) -> Block:
    """Rank the heads of each role by value, with the threshold and the baseline that the value had to exceed."""
    roles = result.table("roles")
    role_names = roles["role"].tolist()
    # Rows are ordered by role first, as in the legend: the position of each row's role there, (row,).
    legend_roles = list(choose_result_marks(result))
    legend_positions = np.array([legend_roles.index(name) for name in role_names])
    # The share of the head's attention that a role's value is measured on: outside sinks, or all (NaN).
    counted_shares = []
    for active_share in roles["active_share"].tolist():
        counted_shares.append("all" if math.isnan(active_share) else format_percent(active_share))
    sink_shares = result.table("heads")["resting_share"][roles["head"]]
    return Ranking(
        heading="the evidence for each role",
        printed="with --all",
        header="role",
        names=list(map(label, role_names)),
        table=roles.with_column(number_column("baseline"), roles.companion("value", "baseline")),
        columns=[
            WordsColumn("head", np.array(result.head_names)[roles["head"]].tolist()),
            "value",
            WordsColumn("q", list(map(q_value, roles["q"].tolist()))),
            "threshold",
            "baseline",
            WordsColumn("sink mass", list(map(format_percent, sink_shares.tolist()))),
            WordsColumn("share", counted_shares),
        ],
        order=np.lexsort((-roles["value"], legend_positions)).tolist(),
        n_printed=len(roles),
        notes=[
            "a role's value must exceed its baseline and its threshold; share: how much of the head's attention the "
            "value counts: all of it, or that share outside sinks; sink mass: attention on special tokens and the first"
        ],
    )


def describe_sample(result: Result) -> str:
    """Return on which texts heads were described, such as "described from 274 texts (2,000 queries): …".

    The line is empty if heads were not described.
    """
    sample = result.options.get("described")
    if not sample:
        return ""
    # Descriptions are fitted on some of the texts that were sampled from the corpus, and scored on the others.
    n_sampled = sample["n_texts"]
    n_scored = sample["n_scored"]
    n_texts = result.corpus.get("n_texts")
    texts_phrase = amount(n_sampled, "text")
    if isinstance(n_texts, int) and n_texts > n_sampled:
        texts_phrase = f"{n_sampled:,} of {amount(n_texts, 'text')}"
    return (
        f"described from {texts_phrase} ({amount(sample['n_queries'], 'query', 'queries')}): "
        f"fitted on {n_sampled - n_scored:,}, scored on {amount(n_scored, 'other')}"
    )


def explain_descriptions(result: Result) -> list[str]:
    """Return sentences on the descriptions: their texts, their stability, their precision, and how to read them."""
    heads = result.table("heads")
    if not is_described(result):
        return []
    notes = [describe_sample(result)]

    # A description is fitted on each half of the texts. The column "other_half" holds the first term of the second
    # half if it differs from the column "first_term", else "". (head,)
    is_different = heads["other_half"] != ""
    # A head that has no term in either half cannot be compared.
    is_compared = is_different | (heads["first_term"] != "")
    n_different = int(is_different.sum())
    n_compared = int(is_compared.sum())
    if n_compared:
        mark = "; ! marks heads in which they differ" if n_different else ""
        notes.append(
            "stability: both halves of the texts have the same first term outside sinks in "
            f"{n_compared - n_different} of {amount(n_compared, 'head')}{mark}"
        )
    # Without an interval, low and high are NaN. Comparisons with NaN are False, so these heads are unsure too. (head,)
    _, low, high = heads.interval("kl_explained").T
    is_sure = high - np.maximum(low, 0) <= MAX_INTERVAL_WIDTH
    n_unsure = int((~is_sure & (heads["whole_nats"] >= MIN_NATS_TO_EXPLAIN)).sum())
    if n_unsure:
        notes.append(
            f"these texts cannot tell how much of {amount(n_unsure, 'head')} is explained: the interval is wider than "
            f"{100 * MAX_INTERVAL_WIDTH:.0f} points, or there is none (?); give more texts, as a head that mostly "
            "rests needs many"
        )
    notes.append(
        "nouns 1.6× (door, key): nouns, such as door and key, get 1.6 times what the rest of the line gives them; "
        "(69%; uniform 34%): the share of attention there, and under uniform attention; then: a weaker part; "
        "equally: an equally strong part; from …: only from such queries"
    )
    return notes


def is_described(result: Result) -> bool:
    """Return whether heads have descriptions."""
    return "description" in result.table("heads")


def require_sort(sort: str | None) -> None:
    """Raise a UsageError if an order is not in `SORTS`; None is allowed."""
    if sort is not None:
        require_choice("order", sort, SORTS)


def order_heads(result: Result, sort: str | None = None) -> list[int]:
    """Return the rows of the table of heads in an order of `SORTS`, undefined numbers last; None = as in the model."""
    heads = result.table("heads")
    sort_keys = np.zeros(len(heads))
    if sort == "entropy" and "entropy_nats" in heads:
        sort_keys = heads["entropy_nats"]
    elif sort == "explained" and is_described(result):
        sort_keys = -heads["kl_explained"]
    return list(map(int, np.argsort(sort_keys, kind="stable")))
