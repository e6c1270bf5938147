"""Parse Python source into a text with links between its brackets and names, by `tokenize` and `ast`.

    closing→opening      from a closing bracket to the one that it closes
    name→assignment      from a name to its latest assignment (=, for, with, :=, except, comprehensions)
    name→parameter       from a name to the parameter that it is
    name→import          from an imported name to where it is imported
    call→definition      from the name that is called to its def or class

The latest assignment is the last one evaluated before the name in the order of the source, in the same function or one
around it. A name whose only assignment comes later (in a loop, say), or that is not bound in this file, has no link;
nor have names in f-strings. Words are Python's tokens; strings and comments are split into words as in other texts.
"""

import ast
import io
import tokenize
import unicodedata
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Sequence
from itertools import accumulate

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.text import word_spans

_LAYOUT = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
"""Types of tokens that are no words."""

# Since Python 3.12 f-strings come in parts.
_PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""Types of tokens that are split into words."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_SCOPES = (*_DEFINITIONS, ast.Lambda)

_EVALUATION_ORDER: dict[type[ast.AST], Sequence[str]] = {
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("annotation", "value", "target"),
    ast.AugAssign: ("value", "target"),
    ast.NamedExpr: ("value", "target"),
    ast.For: ("iter", "target", "body", "orelse"),
    ast.AsyncFor: ("iter", "target", "body", "orelse"),
    ast.comprehension: ("iter", "target", "ifs"),
    ast.ListComp: ("generators", "elt"),
    ast.SetComp: ("generators", "elt"),
    ast.GeneratorExp: ("generators", "elt"),
    ast.DictComp: ("generators", "key", "value"),
    ast.JoinedStr: (),
    **dict.fromkeys(
        _DEFINITIONS, ("decorator_list", "bases", "keywords", "args", "returns", "name", "body")
    ),
}
"""The fields of a node in the order in which Python evaluates them, where `_fields` has another order."""

_RELATIONS = dict.fromkeys(_DEFINITIONS, "call→definition") | {ast.ExceptHandler: "name→assignment"}
"""The relation of a link to a node that binds the name in its field `name`."""


def parse(text: str, source: str, line: int = 1) -> AnnotatedText:
    """Return a Python file as an annotated text: its words and its links.

    Raises:
        AnnotationError: The file does not parse.
    """
    # Parse twice: `ast` has the scopes, `tokenize` the words.
    try:
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except SyntaxError as error:
        raise AnnotationError(f"not Python: {error.msg}", error.lineno) from None
    except (tokenize.TokenError, ValueError, RecursionError, MemoryError) as error:
        raise AnnotationError(f"not Python: {error}") from None

    # Where each line starts in the text. (splitlines would also split at characters that Python does not.)
    line_lengths = [len(line) + 1 for line in text.split("\n")]
    line_starts = list(accumulate(line_lengths, initial=0))
    # Find the words, and link brackets, which match because the file parses.
    words: list[Span] = []
    links: list[Link] = []
    opened: list[int] = []
    for token in tokens:
        start, stop = (line_starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type in _PROSE:
            words += [(start + first, start + last) for first, last in word_spans(text[start:stop])]
            continue
        if token.type in _LAYOUT or not token.string.strip():
            continue
        if token.string in ("(", "[", "{"):
            opened.append(len(words))
        elif token.string in (")", "]", "}"):
            links.append(Link("closing→opening", (len(words),), (opened.pop(),)))
        words.append((start, stop))

    names = _NameLinker(text, line_starts, words)
    names.visit(tree)
    return AnnotatedText(text, tuple(words), (*links, *names.links), source, line, document=source)


class _NameLinker(ast.NodeVisitor):
    """Visit a file in Python's order of evaluation, and link names to the words that bind them.

    Attributes:
        links: The links so far.
    """

    def __init__(self, text: str, line_starts: Sequence[int], words: Sequence[Span]) -> None:
        self.links: list[Link] = []
        self._text = text
        self._line_starts = line_starts
        self._word_starts = [start for start, _ in words]
        # The words in the normal form in which ast has names.
        self._normalised = [unicodedata.normalize("NFKC", text[start:stop]) for start, stop in words]
        # Name -> the word that bound it last, and the relation of a link to this word; one map for each open scope.
        self._bindings: ChainMap[str, tuple[int, str]] = ChainMap()
        # The function expression of the last call visited: a name that is this node is called.
        self._called: ast.expr | None = None

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the children of a node in the order of evaluation; the body of a function or class is a scope."""
        outer = self._bindings
        for field in _EVALUATION_ORDER.get(type(node), node._fields):
            value = getattr(node, field, None)
            relation = _RELATIONS.get(type(node))
            if field == "name" and value and relation:
                self._bind(value, node, relation)
            elif field == "body" and isinstance(node, _SCOPES):
                # Decorators, defaults and annotations come before the body, outside the scope. Parameters are bound in
                # it; a class has none: among its own children there is no `ast.arg`.
                self._bindings = outer.new_child()
                for parameter in ast.iter_child_nodes(getattr(node, "args", node)):
                    if isinstance(parameter, ast.arg):
                        self._bind(parameter.arg, parameter, "name→parameter")
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self._bindings = outer

    def _word_of(self, name: str, node: ast.AST) -> int:
        """Return the first word that spells a name from the start of a node on."""
        row: int = node.lineno - 1  # type: ignore[attr-defined]
        column: int = node.col_offset  # type: ignore[attr-defined]
        # ast counts columns in bytes of UTF-8, words have characters.
        line_start = self._line_starts[row]
        before = self._text[line_start : line_start + column].encode()[:column].decode()
        first_word = bisect_left(self._word_starts, line_start + len(before))
        return self._normalised.index(name, first_word)

    def _bind(self, name: str, node: ast.AST, relation: str) -> None:
        """Bind a name in the current scope to the word of a node that spells it."""
        self._bindings[name] = self._word_of(name, node), relation

    def visit_alias(self, node: ast.alias) -> None:
        if node.name != "*":
            name = node.asname or node.name.split(".")[0]
            self._bind(name, node, "name→import")

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        self._called = node.func
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:  # noqa: N802
        if isinstance(node.ctx, ast.Store):
            self._bind(node.id, node, "name→assignment")
        elif node.id in self._bindings:
            # Names of functions and classes are linked only where they are called.
            target, relation = self._bindings[node.id]
            if relation != "call→definition" or node is self._called:
                word = self._word_of(node.id, node)
                self.links.append(Link(relation, (word,), (target,)))
