"""Assemble the HTML file: JSON, packed blocks, script, style sheet, and a policy that lets no other script run.

The script is made of the ES modules in `pages/src`, joined into one, as a file without a network can import none.
"""

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

# The name and version of the manifest's format.
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
"""The ES modules of every page. A module comes after the modules that it imports."""

OPTIONAL_MODULES = {
    "heads": ("wording", "catalog", "query", "scatter", "atlas", "card", "examples", "head"),
    "photo": ("photo",),
}
"""Modules that only some pages need, by the name of a part of the page. The module `app` comes after them.

A part may also have a style sheet of the same name, such as `heads.css`.
"""

# What is removed as modules are joined: imports from other modules, indentation, and the word `export`.
_IMPORT = re.compile(r"^import\s+(?:[\w*{][^;]*?\s+from\s+)?\"\./(\w+)\.js\";\n", re.MULTILINE)
_INDENT = re.compile(r"^[ ]+", re.MULTILINE)
_EXPORT = re.compile(r"^export\s+(?=(?:async\s+)?(?:function|class|const|let)\b)", re.MULTILINE)


@dataclass(eq=False)
class Page:
    """Hold one HTML file that shows attention. A notebook displays it below the cell.

    Attributes:
        html: The content of the file.
    """

    html: str

    def save(self, path: str | Path) -> Path:
        """Write the file, whole or not at all, and return its path.

        Raises:
            AttnscopeError: The file cannot be written.
        """
        return write_whole(Path(path), self.html.encode())

    # A sandboxed iframe keeps the page's script from the notebook.
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
    """Return the page's modules joined into one, without imports and exports, as all names share one scope."""
    source = files("attnscope.pages") / "src"
    modules = [*COMMON_MODULES]
    for part in parts:
        modules += OPTIONAL_MODULES[part]
    modules.append("app")
    sources = []
    for name in modules:
        text = (source / f"{name}.js").read_text(encoding="utf-8")
        sources.append(_EXPORT.sub("", _IMPORT.sub("", text)))
    code = '"use strict";\n' + "\n".join(sources)
    # Removing indentation would damage a template literal of several lines, which has an odd number of backticks in a
    # line.
    if any(line.count("`") % 2 for line in code.splitlines()):
        raise ValueError("a text in backticks that goes over lines: its indentation would be lost")
    # Encode in ASCII. One letter beyond Latin-1 makes a browser hold the whole file, with its data, in 16 bits per
    # letter, which takes twice as long to read. JavaScript knows Python's escapes \xhh and \uhhhh, but not \Uhhhhhhhh.
    code = _INDENT.sub("", code).encode("ascii", "backslashreplace").decode()
    # These two strings would end or hide the rest of the script element.
    if "</script" in code.lower() or "<!--" in code or "\\U" in code:
        raise ValueError(
            "a script that ends its own element, or a letter that JavaScript escapes otherwise"
        )
    return code


@cache
def build_style_sheet(*parts: str) -> str:
    """Return the page's style sheet: the common style sheets and those of its parts, joined."""
    source = files("attnscope.pages") / "src"
    sheet = ""
    for name in ("style", "views", *parts):
        path = source / f"{name}.css"
        if path.is_file():
            sheet += path.read_text(encoding="utf-8")
    sheet = _INDENT.sub("", sheet)
    # Encode in ASCII too. CSS escapes a character as a backslash, its code point in hexadecimal, and a space.
    return re.sub(r"[^\x00-\x7f]", lambda letter: f"\\{ord(letter[0]):x} ", sheet)


def policy_hash(text: str) -> str:
    """Return the source expression that allows one inline script or style in a Content-Security-Policy: its hash."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def assemble(manifest: Mapping[str, Any], blocks: Sequence[str], parts: Sequence[str] = ()) -> str:
    """Return the HTML file.

    Args:
        manifest: JSON values that say what the page shows.
        blocks: Packed data, base64 each. The page's script finds them as the elements d0, d1 and so on.
        parts: Keys of `OPTIONAL_MODULES` that the page needs beside the common modules.
    """
    # Escape "<" in the JSON, as "</script" would end its script element. ensure_ascii escapes lone surrogates, which
    # UTF-8 cannot encode.
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
        # PAGE_MARK, by which attnscope knows its own pages, is an open tag: <meta name="generator" content="attnscope
        f'{PAGE_MARK.decode()}{VERSION}">\n<title>attnscope</title>',
        f"<style>{css}</style>\n</head>\n<body>",
        "<noscript>This page draws attention weights with a script of its own, and needs JavaScript.</noscript>",
        f'<script type="application/json" id="manifest">{data}</script>',
    ]
    for number, block in enumerate(blocks):
        elements.append(f'<script type="text/plain" id="d{number}">{block}</script>')
    elements.append(f'<script type="module">{code}</script>\n</body>\n</html>\n')
    return "\n".join(elements)
