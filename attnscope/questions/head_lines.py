"""Say in a line what each head does, by its roles and its description, how surely, and with what evidence.

`questions.heads` and `questions.atlas` put these lines into their reports.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attnscope.errors import amount, require_choice
from attnscope.questions.head_roles import SINKS, RoleGrid, marks_of
from attnscope.report.blocks import Block, Note, Ranking, Special, Words, rank_heads
from attnscope.report.numbers import largest_first, percent, q_value, with_interval
from attnscope.report.plain_text import cut
from attnscope.report.wording import label, printable
from attnscope.results.result import Result
from attnscope.results.table import Floats, Table
from attnscope.results.table import number as number_column

SORTS = ("layer", "explained", "entropy")
"""Orders of heads: as in the model, the best described, or the sharpest first."""

EVEN = 0.1
"""Nats from uniform below which a head is said to spread evenly, whatever could be said of the rest."""

UNSURE = 0.5
"""If the interval of an explained share is wider than this, these texts cannot tell it."""

_MOST_LISTED = 10
"""Heads that are listed where neither heads nor an order are chosen."""

_MOST_SORTED = 20
"""Heads that are listed in an order that was chosen."""

_SHORT_LINE = 36
"""Letters of a head's line in these lists; the whole line comes with --all."""

_SHARES = re.compile(r" \((\d+%; uniform )?\d+%\)")
"""What a short line leaves out, such as " (69%; uniform 34%)"."""

_CUTS = re.compile(r"(?<=[,;]) (?![^(]*\))")
"""Where a line may be cut: after a comma or semicolon that is in no brackets."""

_NEXT_TERM = re.compile(r"; (?:then|equally) ")
"""What stands between the terms of a line."""

_EXACT = ("previous token", "next token", "self token")
"""Roles that name one distance, which a line need not repeat."""


def line_blocks(result: Result, sort: str | None, *, is_chosen: bool) -> Iterator[Block]:
    """Show the heads with most to say, then with --all every head, the roles and their evidence."""
    table = result.table("heads")
    order = sort_heads(result, sort)
    columns: list[str | Words] = []
    # The effect of taking a head out comes first, under the name of its quantity.
    effect = _effect_column(result)
    if effect:
        columns.append(effect)
    # The values of roles and the explained shares appear only where some head has one.
    for words in (
        Words("value [interval]", _values(result)),
        Words("KL explained", _explained_texts(table)),
    ):
        if any(words.texts):
            columns.append(words)
    whole_lines = []
    short_lines = []
    for row in range(len(table)):
        whole, short = _lines(table, row)
        whole_lines.append(whole)
        short_lines.append(short)
    whole_columns = [Words("what it does", whole_lines, wraps=True), *columns]
    # One head or a few: whole lines; all heads: short ones, the heads with most to say first.
    if is_chosen:
        yield rank_heads(result, whole_columns, order, n_printed=len(order))
    else:
        columns.insert(0, Words("what it does", short_lines))
        if sort == "entropy" and "entropy_nats" in table:
            columns.insert(0, "entropy_nats")
        shown = order
        n_printed = _MOST_SORTED
        if sort is None:
            shown = largest_first(_how_much_to_say(result), _MOST_LISTED)
            n_printed = _MOST_LISTED
        yield rank_heads(result, columns, shown, n_printed=n_printed)
        yield _what_next(result, len(order) - len(shown))
        yield rank_heads(
            result,
            whole_columns,
            order,
            heading="every head",
            printed="with --all",
            n_printed=len(order),
        )
    # Roles as a grid of letters, and the numbers behind them.
    if len(result.table("roles")):
        grid = RoleGrid(result)
        yield Special(heading="first role of each head", printed="with --all", figure="roles", view=grid)
        yield _evidence(result)


def _how_much_to_say(result: Result) -> Floats:
    """Return how many nats of each head its line predicts, (head,); without lines, its largest role's value."""
    heads = result.table("heads")
    if is_described(result):
        nats: Floats = np.maximum(heads["kl_explained"], 0) * heads["nats"] * heads["active_share"]
        return np.where(np.isfinite(nats), nats, 0.0)
    # Heads that have only roles of sinks or diffuse attention come late, heads without any role last: (head,).
    values = np.where(heads["role"] == "", -1.0, -0.5)
    roles = result.table("roles")
    is_telling = ~np.isin(roles["role"], (*SINKS, "diffuse"))
    # A head may have several such roles; the largest value counts.
    np.fmax.at(values, roles["head"][is_telling], roles["value"][is_telling])
    return values


def _what_next(result: Result, n_more: int) -> Note:
    """Say how many heads are not listed, and which command to run next."""
    lines = [f"… {n_more} more with --all"] if n_more else []
    # Of sources only files have a dot: texts of the command line cannot be named again.
    sources = [str(source) for source in result.corpus.get("sources") or () if "." in str(source)]
    model = result.run.get("model")
    is_default = model in (None, "minilm", "all-MiniLM-L6-v2")
    model_option = "" if is_default else f" -m {printable(model)}"
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


def _lines(heads: Table, row: int) -> tuple[str, str]:
    """Return what a head does in a line that joins its roles and its description: the whole one and a short one."""
    names = [name for name in str(heads["role"][row]).split("+") if name]
    description = str(heads["description"][row]) if "description" in heads else ""
    if not description:
        words = ", ".join(map(label, names)) or "unclassified"
        return words, words
    roles = [label(name) for name in names if name not in SINKS]
    whole = printable(description, 1000)
    other_half = str(heads["other_half"][row])
    if other_half:
        whole += f" ! {printable(other_half, 200)}"
    phrase = _SHARES.sub("", str(heads["summary"][row])) or description
    if not roles:
        return whole, _fit(_CUTS.split(phrase), _SHORT_LINE)
    return f"{', '.join(roles)}: {whole}", _short_line(roles[0], phrase)


def _short_line(role: str, phrase: str) -> str:
    """Return a role and as much of a phrase as fits, without what the role says already."""
    # Of an exact role the first term is that distance.
    if role in _EXACT:
        phrase = " ".join(_NEXT_TERM.split(phrase)[1:])
        if not phrase:
            return role
    parts = _CUTS.split(phrase)
    room = _SHORT_LINE - len(role) - 2
    # Where not even its first part has room, a mark says that there is more.
    if role in _EXACT and len(parts[0]) > room - 2:
        return f"{role} …"
    if phrase.startswith(f"the {role}"):
        return _fit(parts, _SHORT_LINE)
    fitting = _fit(parts, room)
    return f"{role}: {fitting}" if fitting else role


def _fit(parts: Sequence[str], room: int) -> str:
    """Join as many parts of a line as there is room for; the first always stands, without its examples if need be."""
    # Two letters are kept for " …".
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


def _values(result: Result) -> list[str]:
    """Return the value of each head's first role that is no sink's, with its interval; empty = it has none."""
    texts = [""] * len(result.table("heads"))
    roles = result.table("roles")
    # (role, 3); the roles of a head stand together, the first one first.
    values = roles.interval("value")
    for row, head in enumerate(roles["head"].tolist()):
        if texts[head] or roles["role"][row] in SINKS:
            continue
        tentative = " tentative" if roles["tentative"][row] else ""
        texts[head] = with_interval(values[row]) + tentative
    return texts


def _explained_texts(heads: Table) -> list[str]:
    """Return the share that each line explains, with its interval in per cent; "?" = these texts cannot tell it."""
    texts = [""] * len(heads)
    if "kl_explained" not in heads:
        return texts
    shares = heads.interval("kl_explained").tolist()
    # Attention close to uniform leaves nothing to explain.
    for row in np.flatnonzero(heads["nats"] >= EVEN).tolist():
        explained, low, high = shares[row]
        if math.isnan(low):
            texts[row] = f"{percent(explained)} ?"
        else:
            low_percent = max(round(100 * low), 0)
            high_percent = max(round(100 * high), 0)
            texts[row] = f"{percent(explained)} [{low_percent}, {high_percent}]"
    return texts


def _effect_column(result: Result) -> str:
    """Return the column of what changes without each head (--causal); empty = no head was taken out."""
    causal = result.options.get("causal")
    name = f"zero_{causal.get('quantity')}" if isinstance(causal, Mapping) else ""
    return name if name in result.table("heads") else ""


def _evidence(result: Result) -> Block:
    """Show each role's heads, the largest value first, with what the value had to exceed."""
    roles = result.table("roles")
    names = roles["role"].tolist()
    # Roles stand in the order of their legend: the place of each row's role in it, (row,).
    legend = list(marks_of(result))
    legend_places = np.array(list(map(legend.index, names)), np.int64)
    # A role outside sinks counts the part of the attention that sinks leave, others count all.
    shares = []
    for active in roles["active_share"].tolist():
        shares.append("all" if math.isnan(active) else percent(active))
    sink_shares = result.table("heads")["resting_share"][roles["head"]]
    return Ranking(
        heading="the evidence for each role",
        printed="with --all",
        header="role",
        names=list(map(label, names)),
        table=roles.with_column(number_column("baseline"), roles.part("value", "baseline")),
        columns=[
            Words("head", np.array(result.head_names)[roles["head"]].tolist()),
            "value",
            Words("q", list(map(q_value, roles["q"].tolist()))),
            "threshold",
            "baseline",
            Words("sink mass", list(map(percent, sink_shares.tolist()))),
            Words("share", shares),
        ],
        order=np.lexsort((-roles["value"], legend_places)).tolist(),
        n_printed=len(roles),
        notes=[
            "a role's value must exceed its baseline and its threshold; share: how much of the head's attention the "
            "value counts: all of it, or that share outside sinks; sink mass: attention on special tokens and the first"
        ],
    )


def sample_line(result: Any) -> str:
    """Return on which texts heads were described, such as "described from 274 texts (2,000 queries): …"."""
    described = result.options.get("described")
    if not described:
        return ""
    # Texts that were drawn from the corpus; lines were fitted on some of them, and scored on the others.
    n_sampled = described["n_texts"]
    n_scored = described["n_scored"]
    n_texts = result.corpus.get("n_texts")
    texts = amount(n_sampled, "text")
    if isinstance(n_texts, int) and n_texts > n_sampled:
        texts = f"{n_sampled:,} of {amount(n_texts, 'text')}"
    queries = amount(described["n_queries"], "query", "queries")
    others = amount(n_scored, "other")
    return f"described from {texts} ({queries}): fitted on {n_sampled - n_scored:,}, scored on {others}"


def description_notes(result: Result) -> list[str]:
    """Say from which texts heads are described, how lines read, and how sure they are: one sentence each."""
    heads = result.table("heads")
    if not is_described(result):
        return []
    notes = [sample_line(result)]

    # Halves were compared where they differ, or where there is a first term that both have: (head,).
    differs = heads["other_half"] != ""
    is_compared = differs | (heads["first_term"] != "")
    n_different = int(differs.sum())
    n_compared = int(is_compared.sum())
    if n_compared:
        mark = "; ! marks heads in which they differ" if n_different else ""
        notes.append(
            "stability: both halves of the texts have the same first term outside sinks in "
            f"{n_compared - n_different} of {amount(n_compared, 'head')}{mark}"
        )
    # Where the interval is wide or unknown, these texts cannot tell.
    _, low, high = heads.interval("kl_explained").T
    is_sure = high - np.maximum(low, 0) <= UNSURE
    n_unsure = int((~is_sure & (heads["whole_nats"] >= EVEN)).sum())
    if n_unsure:
        notes.append(
            f"these texts cannot tell how much of {amount(n_unsure, 'head')} is explained: the interval is wider than "
            f"{100 * UNSURE:.0f} points, or there is none (?); give more texts, as a head that mostly rests needs many"
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
    """Return the rows of heads in an order; None = as in the model, and what is undefined comes last."""
    heads = result.table("heads")
    values = np.zeros(len(heads))
    if sort == "entropy" and "entropy_nats" in heads:
        values = heads["entropy_nats"]
    elif sort == "explained" and is_described(result):
        values = -heads["kl_explained"]
    order: list[int] = np.argsort(values, kind="stable").tolist()
    return order
