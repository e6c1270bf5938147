"""One line per head: what it does by its roles and its description, how surely, and with what evidence."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from attnscope.errors import amount, require_choice
from attnscope.questions.head_roles import RoleGrid, marks_of
from attnscope.report.blocks import Block, Note, Ranking, Special, Words, rank_heads
from attnscope.report.numbers import interval, largest_first, number, percent, q_value
from attnscope.report.plain_text import cut
from attnscope.report.wording import label, printable
from attnscope.results.result import Result
from attnscope.results.table import Floats, Table
from attnscope.results.table import number as number_column

SORTS = ("layer", "explained", "entropy")
"""Orders of heads: as in the model, the best described, or the sharpest first."""

SINKS = ("first_token", "outlier_token", "sink", "delimiter")
"""Roles of heads that rest: their attention goes where it does nothing."""

EVEN = 0.1
"""Nats from uniform below which a head is said to spread evenly, whatever could be said of the rest."""

UNSURE = 0.5
"""If the interval of an explained share is wider than this, these texts cannot tell it."""

MOST_TOLD = 10
"""Heads that are listed where neither heads nor an order are chosen."""

MOST_SORTED = 20
"""Heads that are listed in an order that was chosen."""

MOST_LETTERS = 36
"""Letters of a head's line in that list; the whole line comes with --all."""

_SHARES = re.compile(r" \((\d+%; uniform )?\d+%\)")
"""What a short line leaves out, such as " (69%; uniform 34%)"."""

_PARTS = re.compile(r"(?<=[,;]) (?![^(]*\))")
"""Where a line may be cut: after a comma or semicolon that is in no brackets."""

_EXACT = ("previous_token", "next_token", "self_token")
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
    # The interval and the explained share appear only where some head has one.
    said = [Words("value [interval]", _values(result)), Words("KL explained", _explained_texts(table))]
    columns += [words for words in said if any(words.texts)]
    # One head or a few: full lines; all heads: short ones, the heads with most to say first.
    whole, short = zip(*(_lines(table, row) for row in range(len(table))), strict=True)
    whole_lines = Words("what it does", whole, wraps=True)
    if is_chosen:
        yield rank_heads(result, [whole_lines, *columns], order, most=len(order))
    else:
        first: list[str | Words] = [Words("what it does", short)]
        if sort == "entropy" and "entropy_nats" in table:
            first.insert(0, "entropy_nats")
        shown = order
        most = MOST_SORTED
        if sort is None:
            shown = largest_first(_telling(result), MOST_TOLD)
            most = MOST_TOLD
        yield rank_heads(result, [*first, *columns], shown, most=most)
        yield _next(result, len(order) - len(shown))
        # With --all: every head with its full line.
        columns = [whole_lines, *columns]
        yield rank_heads(
            result, columns, order, heading="every head", printed="with --all", most=len(order)
        )
    # Roles as a grid of letters, and the numbers behind them.
    if len(result.table("roles")):
        grid = RoleGrid(result)
        yield Special(heading="first role of each head", printed="with --all", figure="roles", view=grid)
        yield _evidence(result)


def _telling(result: Result) -> Floats:
    """Return how much there is to say of each head: nats that its line predicts; without lines, its role's value."""
    heads = result.table("heads")
    if is_described(result):
        told: Floats = np.maximum(heads["kl_explained"], 0) * heads["nats"] * heads["active_share"]
        return np.where(np.isfinite(told), told, 0.0)
    # Heads that have only roles of sinks or diffuse attention come late, heads without any role last.
    values = np.where(heads["role"] == "", -1.0, -0.5)
    roles = result.table("roles")
    is_telling = ~np.isin(roles["role"], (*SINKS, "diffuse"))
    np.fmax.at(values, roles["head"][is_telling], roles["value"][is_telling])
    return values


def _next(result: Result, n_more: int) -> Note:
    """Say how many heads are not listed, and what to do next."""
    # The rest of the heads, then a command for them.
    lines = [f"… {n_more} more with --all"] if n_more else []
    # Of sources only files have a dot: texts of the command line cannot be named again.
    sources = [str(source) for source in result.corpus.get("sources") or () if "." in str(source)]
    model = result.run.get("model")
    where = "" if model in (None, "minilm", "all-MiniLM-L6-v2") else f" -m {printable(model)}"
    # Decoders without induction on plain text may show it on repeated text.
    kinds = {*result.table("heads")["kind"].tolist()}
    if kinds == {"decoder"} and "induction" not in result.table("roles")["role"] and sources:
        lines.append(f"next, heads that repeat what came before: attnscope heads --probe repeat{where}")
    elif sources:
        lines.append(
            f"next, the texts behind each line: attnscope atlas --file {printable(sources[0])}{where}"
        )
    return Note(lines=lines)


def _lines(heads: Table, row: int) -> tuple[str, str]:
    """Return what a head does in a line that joins its roles and its description: whole, and in MOST_LETTERS."""
    names = [name for name in str(heads["role"][row]).split("+") if name]
    description = str(heads["description"][row]) if "description" in heads else ""
    if not description:
        words = ", ".join(map(label, names)) or "unclassified"
        return words, words
    roles = [label(name) for name in names if name not in SINKS]
    other_half = str(heads["other_half"][row])
    warning = f" ! {printable(other_half, 200)}" if other_half else ""
    whole = printable(description, 1000) + warning
    if roles:
        whole = f"{', '.join(roles)}: {whole}"
    # The short line: the first role, then what fits of the description without what the role says already.
    phrase = _SHARES.sub("", str(heads["summary"][row])) or description
    parts = _PARTS.split(phrase)
    if roles and names[0] in _EXACT:
        # The first term is that distance; the rest begins after "then" or "equally".
        phrase = " ".join(re.split(r"; (?:then|equally) ", phrase)[1:])
        parts = _PARTS.split(phrase) if phrase else []
        # Where no word of it has room, a mark says that there is more.
        if parts and len(parts[0]) > MOST_LETTERS - len(roles[0]) - 4:
            return whole, f"{roles[0]} …"
    if roles and phrase.startswith(f"the {roles[0]}"):
        roles = []  # the phrase says it
    room = MOST_LETTERS - (len(roles[0]) + 2 if roles else 0)
    return whole, ": ".join(filter(None, [*roles[:1], _fit(parts, room)]))


def _fit(parts: Sequence[str], room: int) -> str:
    """Join as many parts of a line as there is room for; the first always stands, without its examples if need be."""
    # The first part has to fit, so it may lose its examples. Two letters are kept for " …".
    line = ""
    if parts and len(parts[0]) > room - 2:
        first = re.sub(r" \([^)]*\)", "", parts[0])
        parts = [cut(first, room - 2, at_word=True), *parts[1:]]
    # Whole parts, as many as fit.
    for number_of_part, part in enumerate(parts):
        joined = f"{line} {part}".strip()
        if number_of_part and len(joined) > room - 2:
            return line.rstrip(",;…") + " …"
        line = joined
    return line.rstrip(",;")


def _values(result: Result) -> list[str]:
    """Return the value of each head's first role that is no sink's, with its interval."""
    texts = [""] * len(result.table("heads"))
    roles = result.table("roles")
    # From the last role to the first, which thus replaces the others of its head.
    for row, (value, low, high) in reversed([*enumerate(roles.interval("value").tolist())]):
        if roles["role"][row] not in SINKS:
            ends = interval(low, high) if math.isfinite(low) else ""
            tentative = " tentative" if roles["tentative"][row] else ""
            texts[roles["head"][row]] = f"{number(value)} {ends}".strip() + tentative
    return texts


def _explained_texts(heads: Table) -> list[str]:
    """Return the share that each line explains, with its interval in per cent; "?" = these texts cannot tell it."""
    if "kl_explained" not in heads:
        return [""] * len(heads)
    texts = []
    # Attention close to uniform leaves nothing to explain.
    for (explained, low, high), nats in zip(
        heads.interval("kl_explained").tolist(), heads["nats"], strict=True
    ):
        if not nats >= EVEN:
            texts.append("")
        elif math.isnan(low):
            texts.append(f"{percent(explained)} ?")
        else:
            ends = ", ".join(str(max(round(100 * end), 0)) for end in (low, high))
            texts.append(f"{percent(explained)} [{ends}]")
    return texts


def _effect_column(result: Result) -> str:
    """Return the column of what changes without each head (--causal); empty = none was taken out."""
    causal = result.options.get("causal")
    name = f"zero_{causal.get('quantity')}" if isinstance(causal, Mapping) else ""
    return name if name in result.table("heads") else ""


def _evidence(result: Result) -> Block:
    """Show each role's heads, the largest value first, with what the value had to exceed."""
    # Roles stand in the order of their legend.
    roles = result.table("roles")
    legend = list(marks_of(result))
    by_role = np.array([legend.index(name) for name in roles["role"].tolist()], np.int64)
    names = [result.head_names[head] for head in roles["head"]]
    resting = result.table("heads")["resting_share"][roles["head"]].tolist()
    # A role outside sinks rests on the part of the attention that sinks leave.
    shares = [
        "all" if math.isnan(active) else percent(active) for active in roles["active_share"].tolist()
    ]
    return Ranking(
        heading="the evidence for each role",
        printed="with --all",
        what="role",
        names=[label(name) for name in roles["role"].tolist()],
        table=roles.with_column(number_column("baseline"), roles.part("value", "baseline")),
        columns=[
            Words("head", names),
            "value",
            Words("q", [q_value(q) for q in roles["q"].tolist()]),
            "threshold",
            "baseline",
            Words("sink mass", [percent(part) for part in resting]),
            Words("share", shares),
        ],
        order=np.lexsort((-roles["value"], by_role)).tolist(),
        most=len(roles),
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
    n_sampled, n_queries, n_scored = (described[name] for name in ("n_texts", "n_queries", "n_scored"))
    n_texts = result.corpus.get("n_texts")
    texts = amount(n_sampled, "text")
    if isinstance(n_texts, int) and n_texts > n_sampled:
        texts = f"{n_sampled:,} of {amount(n_texts, 'text')}"
    queries = amount(n_queries, "query", "queries")
    others = amount(n_scored, "other")
    return f"described from {texts} ({queries}): fitted on {n_sampled - n_scored:,}, scored on {others}"


def description_notes(result: Result) -> list[str]:
    """Say from which texts heads are described, how lines read, and how sure they are: one sentence each."""
    heads = result.table("heads")
    if not is_described(result):
        return []
    notes = [sample_line(result)]

    # How sure they are. Halves were compared where they differ, or where there is a first term that both have.
    differs = heads["other_half"] != ""
    is_compared = differs | (heads["first_term"] != "")
    n_alike, n_compared = int((is_compared & ~differs).sum()), int(is_compared.sum())
    if n_compared:
        notes.append(
            f"stability: both halves of the texts have the same first term outside sinks in {n_alike} of "
            f"{amount(n_compared, 'head')}"
            + ("; ! marks heads in which they differ" if n_alike < n_compared else "")
        )
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
    """Refuse an order that there is not."""
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
