"""Assemble the HTML file: JSON, packed blocks, script and style, and a policy that lets nothing else run."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from attnscope.results.storage import PAGE_MARK, write_whole
from attnscope.version import VERSION

PAGE_SCHEMA = "attnscope.page/1"

COMMON_MODULES = (
    "colour",
    "data",
    "state",
    "dom",
    "pen",
    "heat",
    "heads",
    "grid",
    "why",
    "matrix",
    "links",
    "words",
    "text",
    "compare",
    "save",
)
"""The ES modules of every page, each after those that it imports."""

OPTIONAL_MODULES = {
    "heads": ("wording", "catalog", "query", "scatter", "atlas", "card", "examples", "head"),
    "photo": ("photo",),
}
"""Modules that only some pages have, by the name of the part that they make up. `app`, the last module, follows them.

A part may also have a style sheet, which has its name.
"""

# What is removed as modules are joined: imports from other modules, indentation, and the word `export`.
_IMPORT = re.compile(r"^import\s+(?:[\w*{][^;]*?\s+from\s+)?\"\./(\w+)\.js\";\n", re.MULTILINE)
_INDENT = re.compile(r"^[ ]+", re.MULTILINE)
_EXPORT = re.compile(r"^export\s+(?=(?:async\s+)?(?:function|class|const|let)\b)", re.MULTILINE)


@dataclass(eq=False)
class Page:
    """Hold one HTML file that shows attention; a notebook shows it below the cell.

    Attributes:
        html: The whole file.
    """

    html: str

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all.

        Raises:
            AttnscopeError: It cannot be written.
        """
        return write_whole(Path(path), self.html.encode())

    def _repr_html_(self) -> str:
        content = self.html.replace("&", "&amp;").replace('"', "&quot;")
        return (
            f'<iframe srcdoc="{content}" sandbox="allow-scripts allow-downloads" title="attnscope"'
            ' width="100%" height="760" style="border:1px solid #ccc"></iframe>'
        )

    def __repr__(self) -> str:
        return f"Page({len(self.html) / 2**20:.1f} MiB of HTML; .save(path) writes it)"


@cache
def build_script(*parts: str) -> str:
    """Return the page's modules joined into one; without imports and exports, as all names are in one scope."""
    source = files("attnscope.pages") / "src"
    modules = [*COMMON_MODULES]
    for part in parts:
        modules += OPTIONAL_MODULES[part]
    modules.append("app")
    # Modules one after the other, each after those that it imports.
    joined = []
    for name in modules:
        text = (source / f"{name}.js").read_text(encoding="utf-8")
        joined.append(_EXPORT.sub("", _IMPORT.sub("", text)))
    whole = '"use strict";\n' + "\n".join(joined)
    # Remove indentation too. Only a template literal (in backticks) of several lines could need it.
    if any(line.count("`") % 2 for line in whole.splitlines()):
        raise ValueError("a text in backticks that goes over lines: its indentation would be lost")
    # In ASCII: one letter beyond Latin-1 makes a browser hold the whole file, data and all, in 16 bits a letter, and
    # take twice as long to read it. Python's escapes up to U+FFFF are JavaScript's too; beyond, \U is not.
    whole = _INDENT.sub("", whole).encode("ascii", "backslashreplace").decode()
    if "</script" in whole.lower() or "<!--" in whole or "\\U" in whole:
        raise ValueError(
            "a script that ends its own element, or a letter that JavaScript escapes otherwise"
        )
    return whole


@cache
def build_style_sheet(*parts: str) -> str:
    """Return the page's style sheet: the common ones, and those of its parts, joined."""
    source = files("attnscope.pages") / "src"
    sheet = ""
    for name in ("style", "views", *parts):
        path = source / f"{name}.css"
        if path.is_file():
            sheet += path.read_text(encoding="utf-8")
    sheet = _INDENT.sub("", sheet)
    # In ASCII too: an escape of CSS is a backslash, the number in hexadecimal, and a blank.
    return re.sub(r"[^\x00-\x7f]", lambda letter: f"\\{ord(letter[0]):x} ", sheet)


def policy_hash(text: str) -> str:
    """Return the name of an inline script or style in a Content-Security-Policy."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def assemble(manifest: Mapping[str, Any], blocks: Sequence[str], parts: Sequence[str] = ()) -> str:
    """Return the HTML file.

    Args:
        manifest: What the page shows, for JSON.
        blocks: Packed arrays, which the page's script finds as the elements d0, d1 and so on.
        parts: The names in `OPTIONAL_MODULES` of what the page has beside the common modules.
    """
    # JSON inside of a script element: "<" could end it. A lone surrogate cannot be written as UTF-8, but as an escape.
    data = json.dumps(manifest, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    code = build_script(*parts)
    css = build_style_sheet(*parts)
    policy = (
        f"default-src 'none'; script-src {policy_hash(code)}; style-src {policy_hash(css)}; "
        "img-src data: blob:; connect-src 'none'; form-action 'none'; base-uri 'none'"
    )
    elements = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        # PAGE_MARK is an open tag: <meta name="generator" content="attnscope
        f'{PAGE_MARK.decode()}{VERSION}">\n<title>attnscope</title>',
        f"<style>{css}</style>\n</head>\n<body>",
        "<noscript>This page draws attention weights with a script of its own, and needs JavaScript.</noscript>",
        f'<script type="application/json" id="manifest">{data}</script>',
    ]
    for number, block in enumerate(blocks):
        elements.append(f'<script type="text/plain" id="d{number}">{block}</script>')
    elements.append(f'<script type="module">{code}</script>\n</body>\n</html>\n')
    return "\n".join(elements)
