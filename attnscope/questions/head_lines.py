"""Say in one line what each head does, and list the evidence for it.

A line joins the head's roles and its description, such as "previous token: the previous token (69%; uniform 34%); then
nouns 1.6× (door, key); rests 24% on [CLS]". A description is a series of terms, the strongest first, then what the head
rests on: its sinks. `studies.describe` fits it. `questions.heads` and `questions.atlas` report these lines.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from attnscope.errors import amount, require_choice
from attnscope.questions.head_roles import SINK_ROLES, RoleGrid, marks_of
from attnscope.report.blocks import Block, CustomBlock, Note, Ranking, WordsColumn, rank_heads
from attnscope.report.numbers import largest_first, percent, q_value, with_interval
from attnscope.report.plain_text import cut
from attnscope.report.wording import label, printable
from attnscope.results.result import Result
from attnscope.results.table import Floats, Table
from attnscope.results.table import number as number_column

SORTS = ("layer", "explained", "entropy")
"""Orders of heads: as in the model, the best explained first, or the lowest entropy first."""

EVEN_NATS = 0.1
"""A head whose KL from uniform attention is below this, in nats, spreads evenly: there is nothing to explain."""

WIDEST = 0.5
"""If the interval of an explained share is wider than this, the texts are too few to tell that share."""

_MAX_LISTED = 10
"""The most heads that are listed if the user chose neither heads nor an order."""

_MAX_SORTED = 20
"""The most heads that are listed in an order that the user chose."""

_SHORT_LINE = 36
"""The most letters of a head's line in these lists; --all prints the whole line."""

_SHARES = re.compile(r" \((\d+%; uniform )?\d+%\)")
"""The shares of attention that a short line leaves out, such as " (69%; uniform 34%)"."""

_CUTS = re.compile(r"(?<=[,;]) (?![^(]*\))")
"""The blanks at which a line may be cut: after a comma or semicolon outside brackets."""

_NEXT_TERM = re.compile(r"; (?:then|equally) ")
"""The words between two terms of a description."""

_EXACT = ("previous token", "next token", "self token")
"""Roles that name one distance. The first term of such a head's description names the same distance."""


def line_blocks(result: Result, sort: str | None, *, is_chosen: bool) -> Iterator[Block]:
    """Show the heads with most to say, then with --all every head, the roles and their evidence.

    Args:
        result: The heads.
        sort: One of `SORTS`; None = the heads with most to say first.
        is_chosen: Whether the user picked heads: then every one of them is listed with its whole line.
    """
    heads = result.table("heads")
    order = sort_heads(result, sort)
    columns: list[str | WordsColumn] = []
    # The effect of ablating a head comes first, under the name of its quantity.
    effect = _effect_column(result)
    if effect:
        columns.append(effect)
    # Values of roles and explained shares have a column only if some head has one.
    for words in (
        WordsColumn("value [interval]", _role_values(result)),
        WordsColumn("KL explained", _explained_shares(heads)),
    ):
        if any(words.texts):
            columns.append(words)
    whole_lines = []
    short_lines = []
    for row in range(len(heads)):
        whole, short = _whole_and_short_line(heads, row)
        whole_lines.append(whole)
        short_lines.append(short)
    whole_columns = [WordsColumn("what it does", whole_lines, wraps=True), *columns]
    if is_chosen:
        yield rank_heads(result, whole_columns, order, n_printed=len(order))
    else:
        # A list of short lines; every whole line follows with --all.
        columns.insert(0, WordsColumn("what it does", short_lines))
        if sort == "entropy" and "entropy_nats" in heads:
            columns.insert(0, "entropy_nats")
        # Without an order of the user's, the heads with most to say; in such an order all, of which some are printed.
        listed = order
        if sort is None:
            listed = largest_first(_how_much_to_say(result), _MAX_LISTED)
        yield rank_heads(result, columns, listed, n_printed=_MAX_SORTED)
        yield _what_next(result, len(order) - len(listed))
        yield rank_heads(
            result,
            whole_columns,
            order,
            heading="every head",
            printed="with --all",
            n_printed=0,
        )
    # Roles as a grid of letters, and the numbers behind them.
    if len(result.table("roles")):
        grid = RoleGrid(result)
        yield CustomBlock(
            heading="first role of each head", printed="with --all", figure="roles", view=grid
        )
        yield _evidence(result)


def _how_much_to_say(result: Result) -> Floats:
    """Return how many nats per query each head's line predicts, (head,); without lines, its largest role's value."""
    heads = result.table("heads")
    if is_described(result):
        # The explained share of the KL outside sinks, times the attention outside sinks.
        nats: Floats = np.maximum(heads["kl_explained"], 0) * heads["nats"] * heads["active_share"]
        return np.nan_to_num(nats)
    # Values of roles are 0 or more. A head with only sink roles or diffuse gets -0.5, a head without any role -1.
    values = np.where(heads["role"] == "", -1.0, -0.5)
    roles = result.table("roles")
    is_telling = ~np.isin(roles["role"], (*SINK_ROLES, "diffuse"))
    # Each other role raises its head's value, (head,), to its own if that is larger, and no NaN.
    np.fmax.at(values, roles["head"][is_telling], roles["value"][is_telling])
    return values


def _what_next(result: Result, n_unlisted: int) -> Note:
    """Say how many heads are not listed, and which command to run next."""
    lines = [f"… {n_unlisted} more with --all"] if n_unlisted else []
    # The next command can name a file again, and no text of the command line: only names of files have a dot.
    sources = [str(source) for source in result.corpus.get("sources") or () if "." in str(source)]
    model = result.run.get("model")
    # The default model needs no option.
    model_option = "" if model in (None, "minilm", "all-MiniLM-L6-v2") else f" -m {printable(model)}"
    # Decoders without induction on plain text may show it on repeated text.
    kinds = {*result.table("heads")["kind"].tolist()}
    if kinds == {"decoder"} and "induction" not in result.table("roles")["role"] and sources:
        lines.append(
            f"next, heads that repeat what came before: attnscope heads --probe repeat{model_option}"
        )
    elif sources:
        lines.append(
            f"next, the texts behind each line: attnscope atlas --file {printable(sources[0])}{model_option}"
        )
    return Note(lines=lines)


def _whole_and_short_line(heads: Table, row: int) -> tuple[str, str]:
    """Return what a head does, in a whole line and in a short one that has at most `_SHORT_LINE` letters.

    Without a description both name all roles.
    """
    names = [name for name in str(heads["role"][row]).split("+") if name]
    description = str(heads["description"][row]) if "description" in heads else ""
    if not description:
        words = ", ".join(map(label, names)) or "unclassified"
        return words, words
    # A description names sinks itself.
    roles = [label(name) for name in names if name not in SINK_ROLES]
    whole = printable(description, 1000)
    # What the other half of the texts says first, if that differs.
    other_half = str(heads["other_half"][row])
    if other_half:
        whole += f" ! {printable(other_half, 200)}"
    phrase = _SHARES.sub("", str(heads["summary"][row])) or description
    if not roles:
        return whole, _fit(_CUTS.split(phrase), _SHORT_LINE)
    return f"{', '.join(roles)}: {whole}", _short_line(roles[0], phrase)


def _short_line(role: str, phrase: str) -> str:
    """Return a role and as much of a description as fits, without what the role says already."""
    if role in _EXACT:
        # "previous token": drop the first term, which names the same distance.
        phrase = " ".join(_NEXT_TERM.split(phrase)[1:])
        if not phrase:
            return role
    parts = _CUTS.split(phrase)
    # The role is followed by ": ".
    room = _SHORT_LINE - len(role) - 2
    # "previous token …": the next part does not fit, and the mark alone says that there is more.
    if role in _EXACT and len(parts[0]) > room - 2:
        return f"{role} …"
    # "the first token and …" says the role itself.
    if phrase.startswith(f"the {role}"):
        return _fit(parts, _SHORT_LINE)
    fitting = _fit(parts, room)
    return f"{role}: {fitting}" if fitting else role


def _fit(parts: Sequence[str], room: int) -> str:
    """Join as many parts of a line as fit into `room` letters; a first part that is too long is cut.

    It loses its examples, such as " (door, key)", before it loses words.
    """
    # Two letters are for " …".
    room -= 2
    line, *others = parts
    if len(line) > room:
        line = cut(re.sub(r" \([^)]*\)", "", line), room, at_word=True)
    for part in others:
        joined = f"{line} {part}"
        if len(joined) > room:
            return line.rstrip(",;…") + " …"
        line = joined
    return line.rstrip(",;")


def _role_values(result: Result) -> list[str]:
    """Return the value of each head's first role other than sinks, with its interval; empty = it has no such role.

    A value of attention outside sinks is marked, "0.63 [0.60, 0.65]*"; `questions.heads` explains the mark.
    """
    texts = [""] * len(result.table("heads"))
    roles = result.table("roles")
    # Value, low and high end, (role, 3).
    values = roles.interval("value")
    # The roles of a head stand together, the strongest first.
    for row, head in enumerate(roles["head"].tolist()):
        if texts[head] or roles["role"][row] in SINK_ROLES:
            continue
        mark = "*" if roles["measure"][row].endswith("_active") else ""
        tentative = " tentative" if roles["tentative"][row] else ""
        texts[head] = with_interval(values[row]) + mark + tentative
    return texts


def _explained_shares(heads: Table) -> list[str]:
    """Return the share that each line explains, such as "68% [35, 84]"; "68% ?" = it has no interval."""
    texts = [""] * len(heads)
    if "kl_explained" not in heads:
        return texts
    shares = heads.interval("kl_explained").tolist()
    # Attention close to uniform leaves nothing to explain.
    for row in np.flatnonzero(heads["nats"] >= EVEN_NATS).tolist():
        explained, low, high = shares[row]
        if math.isnan(low):
            texts[row] = f"{percent(explained)} ?"
        else:
            low_percent = max(round(100 * low), 0)
            high_percent = max(round(100 * high), 0)
            texts[row] = f"{percent(explained)} [{low_percent}, {high_percent}]"
    return texts


def _effect_column(result: Result) -> str:
    """Return the name of the column of ablation effects (`heads --causal`); empty = no head was ablated."""
    causal = result.options.get("causal")
    name = f"zero_{causal.get('quantity')}" if isinstance(causal, Mapping) else ""
    return name if name in result.table("heads") else ""


def _evidence(result: Result) -> Block:
    """Show each role's heads, the largest value first, with what the value had to exceed."""
    roles = result.table("roles")
    names = roles["role"].tolist()
    # Roles come in the order of the legend: where each row's role stands in it, (row,).
    legend = list(marks_of(result))
    legend_places = np.array([legend.index(name) for name in names])
    # How much of the head's attention a role's value counts: that outside sinks, or all.
    shares = []
    for share in roles["active_share"].tolist():
        shares.append("all" if math.isnan(share) else percent(share))
    sink_shares = result.table("heads")["resting_share"][roles["head"]]
    return Ranking(
        heading="the evidence for each role",
        printed="with --all",
        header="role",
        names=list(map(label, names)),
        table=roles.with_column(number_column("baseline"), roles.companion("value", "baseline")),
        columns=[
            WordsColumn("head", np.array(result.head_names)[roles["head"]].tolist()),
            "value",
            WordsColumn("q", list(map(q_value, roles["q"].tolist()))),
            "threshold",
            "baseline",
            WordsColumn("sink mass", list(map(percent, sink_shares.tolist()))),
            WordsColumn("share", shares),
        ],
        order=np.lexsort((-roles["value"], legend_places)).tolist(),
        n_printed=len(roles),
        notes=[
            "a role's value must exceed its baseline and its threshold; share: how much of the head's attention the "
            "value counts: all of it, or that share outside sinks; sink mass: attention on special tokens and the first"
        ],
    )


def sample_line(result: Result) -> str:
    """Return on which texts heads were described, such as "described from 274 texts (2,000 queries): …"."""
    sample = result.options.get("described")
    if not sample:
        return ""
    # Texts that were sampled from the corpus; lines were fitted on some of them, and scored on the others.
    n_sampled = sample["n_texts"]
    n_scored = sample["n_scored"]
    n_texts = result.corpus.get("n_texts")
    texts = amount(n_sampled, "text")
    if isinstance(n_texts, int) and n_texts > n_sampled:
        texts = f"{n_sampled:,} of {amount(n_texts, 'text')}"
    queries = amount(sample["n_queries"], "query", "queries")
    others = amount(n_scored, "other")
    return f"described from {texts} ({queries}): fitted on {n_sampled - n_scored:,}, scored on {others}"


def description_notes(result: Result) -> list[str]:
    """Say from which texts heads are described, how lines read, and how sure they are: one sentence each."""
    heads = result.table("heads")
    if not is_described(result):
        return []
    notes = [sample_line(result)]

    # Each half of the texts gives a head a first term. `other_half` is filled if the two differ. (head,)
    differs = heads["other_half"] != ""
    # A head without a term in either half does not count.
    is_compared = differs | (heads["first_term"] != "")
    n_different = int(differs.sum())
    n_compared = int(is_compared.sum())
    if n_compared:
        mark = "; ! marks heads in which they differ" if n_different else ""
        notes.append(
            "stability: both halves of the texts have the same first term outside sinks in "
            f"{n_compared - n_different} of {amount(n_compared, 'head')}{mark}"
        )
    # Heads whose explained share has a wide interval or none, NaN, for which every comparison is False. (head,)
    _, low, high = heads.interval("kl_explained").T
    is_sure = high - np.maximum(low, 0) <= WIDEST
    n_unsure = int((~is_sure & (heads["whole_nats"] >= EVEN_NATS)).sum())
    if n_unsure:
        notes.append(
            f"these texts cannot tell how much of {amount(n_unsure, 'head')} is explained: the interval is wider than "
            f"{100 * WIDEST:.0f} points, or there is none (?); give more texts, as a head that mostly rests needs many"
        )
    notes.append(
        "nouns 1.6× (door, key): nouns, such as door and key, get 1.6 times what the rest of the line gives them; "
        "(69%; uniform 34%): the share of attention there, and under uniform attention; then: a weaker part; "
        "equally: an equally strong part; from …: only from such queries"
    )
    return notes


def is_described(result: Result) -> bool:
    """Return whether heads have lines."""
    return "description" in result.table("heads")


def require_sort(sort: str | None) -> None:
    """Refuse an order that is not in `SORTS`."""
    if sort is not None:
        require_choice("order", sort, SORTS)


def sort_heads(result: Result, sort: str | None = None) -> list[int]:
    """Return the rows of heads in an order of `SORTS`, undefined numbers last; None = as in the model."""
    heads = result.table("heads")
    values = np.zeros(len(heads))
    if sort == "entropy" and "entropy_nats" in heads:
        values = heads["entropy_nats"]
    elif sort == "explained" and is_described(result):
        values = -heads["kl_explained"]
    return list(map(int, np.argsort(values, kind="stable")))
