"""Link names, calls and brackets of Python source by `tokenize` and `ast`, without any annotation.

    closing→opening      from a closing bracket to the one that it closes
    name→assignment      from a name to its latest assignment (=, for, with, :=, except, comprehensions)
    name→parameter       from a name to the parameter that it is
    name→import          from an imported name to where it is imported
    call→definition      from the name that is called to its def or class

The latest assignment is the one that stands last before the name, in its function or around it. A name that is bound
only further down (as around in a loop), or not in this file, has no link; nor have names in f-strings. Words are
Python's own tokens, and of strings and comments the words in them.
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

_NO_WORDS = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
"""Tokens that are no words."""

# Since Python 3.12 f-strings come in parts.
_PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""Tokens that hold words."""

_DEFINITION = ("decorator_list", "bases", "keywords", "args", "returns", "name", "body")
"""Fields of functions and classes in their order of evaluation."""

_EVALUATED: dict[type[ast.AST], Sequence[str]] = {
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
    ast.FunctionDef: _DEFINITION,
    ast.AsyncFunctionDef: _DEFINITION,
    ast.ClassDef: _DEFINITION,
}
"""The order in which Python evaluates the fields of a node, where it is not the order of their places."""

_BINDS = {
    ast.FunctionDef: "call→definition",
    ast.AsyncFunctionDef: "call→definition",
    ast.ClassDef: "call→definition",
    ast.ExceptHandler: "name→assignment",
}
"""The relation of names to a node that binds its `name`."""

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


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

    # Where each line starts. Not by splitlines, which knows more ends of lines than Python does.
    line_lengths = [len(line) + 1 for line in text.split("\n")]
    starts = list(accumulate(line_lengths, initial=0))
    # The words, and links between brackets, which match in what parses.
    words: list[Span] = []
    links: list[Link] = []
    opened: list[int] = []
    for token in tokens:
        row, column = token.start
        start = starts[row - 1] + column
        row, column = token.end
        stop = starts[row - 1] + column
        if token.type in _PROSE:
            words += [(start + first, start + last) for first, last in word_spans(text[start:stop])]
            continue
        if token.type in _NO_WORDS or not token.string.strip():
            continue
        if token.string in ("(", "[", "{"):
            opened.append(len(words))
        elif token.string in (")", "]", "}"):
            links.append(Link("closing→opening", (len(words),), (opened.pop(),)))
        words.append((start, stop))

    names = _Names(text, starts, words)
    names.visit(tree)
    return AnnotatedText(text, tuple(words), (*links, *names.links), source, line, document=source)


class _Names(ast.NodeVisitor):
    """Visit a file in Python's order of evaluation, and link names to the words that bind them.

    Attributes:
        links: The links so far.
    """

    def __init__(self, text: str, starts: Sequence[int], words: Sequence[Span]) -> None:
        self.links: list[Link] = []
        self._text = text
        self._starts = starts
        self._word_starts = [start for start, _ in words]
        # The words as ast spells names.
        self._spelled = [unicodedata.normalize("NFKC", text[start:stop]) for start, stop in words]
        # The word that bound each name last, and the relation of names to it; inner scopes first.
        self._bound: ChainMap[str, tuple[int, str]] = ChainMap()
        # The function of the last call, to tell names that are called.
        self._called: ast.expr | None = None

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the parts of a node in the order of evaluation; the body of a function or class is a scope."""
        outer = self._bound
        for field in _EVALUATED.get(type(node), node._fields):
            value = getattr(node, field, None)
            relation = _BINDS.get(type(node))
            if field == "name" and value and relation:
                self._bind(value, node, relation)
            elif field == "body" and isinstance(node, _SCOPES):
                # Decorators, defaults and annotations were evaluated outside; parameters count inside alone. A class
                # has no `args`, and its own parts hold no parameters.
                self._bound = outer.new_child()
                for parameter in ast.iter_child_nodes(getattr(node, "args", node)):
                    if isinstance(parameter, ast.arg):
                        self._bind(parameter.arg, parameter, "name→parameter")
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    self.visit(child)
        self._bound = outer

    def _word_of(self, name: str, node: ast.AST) -> int:
        """Return the first word of a node, or after its start, that is spelled as a name."""
        row: int = node.lineno - 1  # type: ignore[attr-defined]
        column: int = node.col_offset  # type: ignore[attr-defined]
        # ast counts columns in bytes of UTF-8.
        line_start = self._starts[row]
        before = self._text[line_start : line_start + column].encode()[:column].decode()
        first_word = bisect_left(self._word_starts, line_start + len(before))
        return self._spelled.index(name, first_word)

    def _bind(self, name: str, node: ast.AST, relation: str) -> None:
        """Let a name stand for the word of a node that spells it."""
        self._bound[name] = self._word_of(name, node), relation

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
        elif node.id in self._bound:
            # Names of functions and classes are linked only where they are called.
            target, relation = self._bound[node.id]
            if relation != "call→definition" or node is self._called:
                word = self._word_of(node.id, node)
                self.links.append(Link(relation, (word,), (target,)))
