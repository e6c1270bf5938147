"""Make the HTML page of a batch: a card with a figure for each text, without scripts.

`studies.batch` writes it beside the folders of figures that it links to.
"""

import re
from html import escape
from urllib.parse import quote

from attnscope.errors import amount
from attnscope.pages.document import policy_hash
from attnscope.questions.batch import BatchRun, DrawnText, FailedText

_MAX_CHARACTERS = 400
"""The most characters of a text that its card shows."""

# The suffixes of figures that an <img> element can show; PDF is only linked.
_IMG_SUFFIXES = (".png", ".svg")

# Control characters, and marks that change the direction of text.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

_CSS = """
:root { color-scheme: light dark; --faint: #6f6f6f; --line: #d5d5d5; }
@media (prefers-color-scheme: dark) { :root { --faint: #a5a5a5; --line: #444; } }
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1.5rem; }
h1 { font-size: 1.35rem; margin: 0 0 .25rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p.about, .where { color: var(--faint); margin: 0; }
main { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(20rem, 1fr)); margin-top: 1.5rem; }
article { border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
article > a { background: #fff; display: block; height: 15rem; }
img { display: block; height: 100%; object-fit: contain; object-position: top; width: 100%; }
.facts { padding: .6rem .8rem .8rem; }
.text { margin: .1rem 0 .4rem; overflow-wrap: anywhere; unicode-bidi: isolate; white-space: pre-wrap; }
.where, .files { font-size: .85rem; }
.files a { margin-right: .6em; white-space: nowrap; }
li { margin-bottom: .4rem; overflow-wrap: anywhere; }
"""

_SECURITY_POLICY = (
    f"default-src 'none'; style-src {policy_hash(_CSS)}; img-src 'self' file:; form-action 'none'; "
    "base-uri 'none'"
)
"""The Content-Security-Policy: no scripts, and figures only from the page's own place.

That is 'self' on a server. On disk 'self' allows nothing, and `file:` allows the figures.
"""


def build_gallery(batch: BatchRun) -> str:
    """Return the HTML page of a batch. Texts are escaped: a browser shows their tags as text."""
    # The line of facts below the title. An interrupted run counts only the texts that it drew.
    n_texts = batch.n_texts if batch.complete else len(batch.drawn)
    facts = [amount(n_texts, "text")]
    if batch.failed:
        facts.append(f"{len(batch.failed):,} could not be drawn")
    if not batch.complete:
        facts.append("not finished: the same command draws the rest")
    parts = [
        "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>",
        f'<meta http-equiv=Content-Security-Policy content="{_SECURITY_POLICY}">',
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>{_to_html(batch.model)}: what each head attends to</title>\n<style>{_CSS}</style>",
        f"<h1>{_to_html(batch.model)}: what each head attends to</h1>",
        f"<p class=about>{_to_html(' · '.join(facts))} · <a href=manifest.jsonl>manifest.jsonl</a></p>",
    ]
    # Failures first, then a card per text.
    if batch.failed:
        parts += ["<h2>Could not be drawn</h2>\n<ul>", *map(_write_failure, batch.failed), "</ul>"]
    parts += ["<main>", *map(_write_card, batch.drawn), "</main>\n</html>"]
    return "\n".join(parts) + "\n"


def _write_card(drawn: DrawnText) -> str:
    """Return the HTML of a card: the first figure of a text, its facts, and links to its files."""
    figure = ""
    files = ""
    for name in drawn.files:
        link = quote(f"{drawn.folder}/{name}")
        files += f'<a href="{link}">{_to_html(name)}</a> '
        # The <img> has no width and height, as they depend on the model: CSS gives its box a fixed height.
        if not figure and name.endswith(_IMG_SUFFIXES):
            alt = f"{_to_html(name)} of text {drawn.index}"
            image = f'<img src="{link}" loading=lazy decoding=async alt="{alt}">'
            figure = f'<a href="{link}">{image}</a>\n'
    notes = "".join(f"<p class=where>{_to_html(note)}</p>" for note in drawn.notes)
    where = f"{drawn.index} · {drawn.source}, line {drawn.line} · {amount(len(drawn.tokens), 'token')}"
    # A text that was given as token ids has no string: show the labels of its tokens.
    text = drawn.text or " ".join(drawn.tokens)
    return (
        f'<article id="text-{drawn.index}">\n{figure}<div class=facts>\n<p class=where>{_to_html(where)}</p>\n'
        f"<p class=text dir=auto>{_short_html(text)}</p>\n{notes}<p class=files>{files}</p>\n</div>\n</article>"
    )


def _write_failure(failed: FailedText) -> str:
    """Return the HTML of a list item: a text that could not be drawn, with the reason."""
    text = ""
    if failed.text:
        text = f"<div class=text dir=auto>{_short_html(failed.text)}</div>"
    return f"<li>{_to_html(str(failed))}{text}</li>"


def _short_html(text: str) -> str:
    """Return the beginning of a text, escaped for HTML."""
    if len(text) > _MAX_CHARACTERS:
        text = f"{text[:_MAX_CHARACTERS].rstrip()}…"
    return _to_html(text)


def _to_html(text: str) -> str:
    """Return a text escaped for HTML; characters in `_CONTROL_CHARACTERS` become code points, such as <U+202E>."""
    return escape(_CONTROL_CHARACTERS.sub(lambda match: f"<U+{ord(match[0]):04X}>", text))
