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
from collections.abc import Iterator, Sequence
from itertools import accumulate

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.text import word_spans

_PAIRS = {")": "(", "]": "[", "}": "{"}
_NO_WORDS = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# Since Python 3.12 f-strings come in parts.
_PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

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
}
"""The order in which Python evaluates the fields of a node, where it is not the order of their places."""


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

    # The words, and which of them are operators.
    # Not splitlines, which knows more ends of lines than Python does.
    starts = list(accumulate((len(line) + 1 for line in text.split("\n")), initial=0))
    words: list[Span] = []
    operators: list[tuple[int, str]] = []
    for token in tokens:
        start, stop = (starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type in _PROSE:
            words += [(start + first, start + last) for first, last in word_spans(text[start:stop])]
        elif token.type not in _NO_WORDS and token.string.strip():
            if token.type == tokenize.OP:
                operators.append((len(words), token.string))
            words.append((start, stop))

    names = _Names(text, starts, words)
    names.visit(tree)
    links = (*_link_brackets(operators), *names.links)
    return AnnotatedText(text, tuple(words), links, source, line, document=source)


def _link_brackets(operators: Sequence[tuple[int, str]]) -> Iterator[Link]:
    """Link each closing bracket to the one that it closes."""
    opened: list[tuple[int, str]] = []
    for word, sign in operators:
        if sign in _PAIRS.values():
            opened.append((word, sign))
        elif sign in _PAIRS and opened and opened[-1][1] == _PAIRS[sign]:
            yield Link("closing→opening", (word,), (opened.pop()[0],))


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
        # As ast spells names.
        self._spelled = [unicodedata.normalize("NFKC", text[start:stop]) for start, stop in words]
        # The word that binds each name last, and by what; inner scopes first.
        self._bound: ChainMap[str, tuple[int, str]] = ChainMap()
        self._called: ast.expr | None = None

    def generic_visit(self, node: ast.AST) -> None:
        """Visit what a node consists of, in the order of evaluation."""
        for field in _EVALUATED.get(type(node), node._fields):
            value = getattr(node, field, None)
            self._visit_all(value if isinstance(value, list) else [value])

    def _visit_all(self, nodes: Sequence[ast.AST | None]) -> None:
        for node in nodes:
            if isinstance(node, ast.AST):
                self.visit(node)

    def _visit_scope(self, parameters: Sequence[ast.AST], body: Sequence[ast.AST]) -> None:
        """Visit the body of a function, lambda or class, in a scope with its parameters."""
        outer = self._bound
        self._bound = outer.new_child()
        for parameter in parameters:
            if isinstance(parameter, ast.arg):
                self._bind(parameter.arg, parameter, "name→parameter")
        self._visit_all(body)
        self._bound = outer

    def _word_of(self, name: str, node: ast.AST) -> int:
        """Return the first word of a node, or after its start, that is spelled as a name."""
        row, column = node.lineno - 1, node.col_offset  # type: ignore[attr-defined]
        line = self._text[self._starts[row] :]
        start = self._starts[row] + len(line[:column].encode()[:column].decode())  # ast counts bytes
        return self._spelled.index(name, bisect_left(self._word_starts, start))

    def _bind(self, name: str, node: ast.AST, relation: str) -> None:
        self._bound[name] = self._word_of(name, node), relation

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # noqa: N802
        # Decorators, defaults and annotations are evaluated outside of the function's scope.
        self._visit_all([*node.decorator_list, node.args, node.returns])
        self._bind(node.name, node, "call→definition")
        self._visit_scope([*ast.iter_child_nodes(node.args)], node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: N802
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._bind(node.name, node, "call→definition")
        self._visit_scope([], node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:  # noqa: N802
        self.visit(node.args)
        self._visit_scope([*ast.iter_child_nodes(node.args)], [node.body])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:  # noqa: N802
        self._visit_all([node.type])
        if node.name is not None:
            self._bind(node.name, node, "name→assignment")
        self._visit_all(node.body)

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
                self.links.append(Link(relation, (self._word_of(node.id, node),), (target,)))
