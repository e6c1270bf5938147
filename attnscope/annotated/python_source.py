"""Link names, calls and brackets of Python source by `tokenize` and `ast`, without any annotation.

    closing→opening      from a closing bracket to the one that it closes
    name→assignment      from a name to its latest assignment (=, for, with, :=, except, comprehensions)
    name→parameter       from a name to the parameter that it is
    name→import          from an imported name to where it is imported
    call→definition      from the name that is called to its def or class

The latest assignment is the one that stands last before the name in the scope that Python would look it up in. A name
that is bound only further down (as around in a loop), or not in this file, has no link; nor have names in f-strings.
Words are Python's own tokens, and of strings and comments the words in them.
"""

import ast
import io
import keyword
import tokenize
from bisect import bisect_left
from collections import ChainMap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.text import word_spans

_PAIRS = {")": "(", "]": "[", "}": "{"}
_NO_WORDS = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_KINDS = {tokenize.COMMENT: "comment", tokenize.NUMBER: "number", tokenize.STRING: "string"}
# Since Python 3.12 f-strings come in parts.
_KINDS |= {getattr(tokenize, f"FSTRING_{part}", tokenize.STRING): "string" for part in ("START", "MIDDLE", "END")}
_PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

_EVALUATED: dict[type[ast.AST], Sequence[str]] = {
    ast.Assign: ("value", "targets"),
    ast.AnnAssign: ("annotation", "value", "target"),
    ast.NamedExpr: ("value", "target"),
    ast.For: ("iter", "target", "body", "orelse"),
    ast.AsyncFor: ("iter", "target", "body", "orelse"),
    ast.comprehension: ("target", "ifs"),
    ast.JoinedStr: (),
}
"""The order in which Python evaluates the fields of a node, where it is not the order of their places."""


def parse(text: str, source: str) -> AnnotatedText:
    """Return a Python file as an annotated text: its words, their kinds and its links.

    Raises:
        AnnotationError: The file does not parse.
    """
    # Parse twice: `ast` has the scopes, `tokenize` the words.
    try:
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except SyntaxError as error:
        raise AnnotationError(f"not Python: {error.msg}", error.lineno) from None
    except tokenize.TokenError as error:
        raise AnnotationError(f"not Python: {error.args[0]}", error.args[1][0]) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise AnnotationError(f"not Python: {error}") from None

    # The words, their kinds, and which of them are operators.
    # Not splitlines, which knows more ends of lines than Python does.
    starts = list(accumulate((len(line) + 1 for line in text.split("\n")), initial=0))
    words: list[Span] = []
    kinds: list[str] = []
    operators: list[tuple[int, str]] = []
    for token in tokens:
        start, stop = (starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type in _PROSE:
            words += [(start + first, start + last) for first, last in word_spans(text[start:stop])]
        elif token.type not in _NO_WORDS and token.string.strip():
            if token.type == tokenize.OP:
                operators.append((len(words), token.string))
            words.append((start, stop))
        kinds += [_kind(token)] * (len(words) - len(kinds))

    names = _Names(text, starts, words)
    names.visit(tree)
    links = (*_link_brackets(operators), *names.links)
    return AnnotatedText(text, tuple(words), links, source, 1, document=source, kinds=tuple(kinds))


def _kind(token: tokenize.TokenInfo) -> str:
    """Return the kind of a Python token: keyword, identifier, comment, number, string or operator."""
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "identifier"
    return _KINDS.get(token.type, "operator")


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
        self._spelled = [text[start:stop] for start, stop in words]
        # The word that binds each name last, and by what; inner scopes first.
        self._bound: ChainMap[str, tuple[int, str]] = ChainMap()
        self._is_in_class = False
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

    # Words

    def _word_at(self, line: int, column: int) -> int:
        """Return the first word at or after a place as ast gives it, whose columns count bytes."""
        start = self._starts[line - 1]
        start += len(self._text[start : start + column].encode()[:column].decode())
        return bisect_left(self._word_starts, start)

    def _first_word(self, node: ast.AST) -> int:
        return self._word_at(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _next_word(self, node: ast.AST) -> int:
        """Return the first word after a node."""
        return self._word_at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    # Scopes

    @contextmanager
    def _scope(self, *, is_class: bool = False) -> Iterator[None]:
        """Bind names in a scope of their own. Those of a class are not seen by the scopes in it."""
        outer = self._bound
        was_in_class = self._is_in_class
        self._bound = (outer.parents if was_in_class else outer).new_child()
        self._is_in_class = is_class
        yield
        self._bound = outer
        self._is_in_class = was_in_class

    def _visit_body(self, args: ast.arguments, body: Sequence[ast.AST]) -> None:
        """Visit the body of a function or lambda, in a scope with its parameters."""
        with self._scope():
            for arg in ast.iter_child_nodes(args):
                if isinstance(arg, ast.arg):
                    self._bound[arg.arg] = self._first_word(arg), "name→parameter"
            self._visit_all(body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # noqa: N802
        # Decorators, defaults and annotations are evaluated outside of the function's scope.
        self._visit_all([*node.decorator_list, node.args, node.returns])
        # The name follows `def`, or `async def`.
        n_keywords = 2 if isinstance(node, ast.AsyncFunctionDef) else 1
        self._bound[node.name] = self._first_word(node) + n_keywords, "call→definition"
        self._visit_body(node.args, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: N802
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._bound[node.name] = self._first_word(node) + 1, "call→definition"
        with self._scope(is_class=True):
            self._visit_all(node.body)

    def visit_Lambda(self, node: ast.Lambda) -> None:  # noqa: N802
        self.visit(node.args)
        self._visit_body(node.args, [node.body])

    def _visit_comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        # Python evaluates the first iterable outside of the comprehension's scope.
        first, *others = node.generators
        self.visit(first.iter)
        with self._scope():
            self.visit(first)
            for part in others:
                self._visit_all([part.iter, part])
            self._visit_all([getattr(node, field, None) for field in ("key", "value", "elt")])

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_comprehension  # noqa: N815

    # Names

    def visit_Name(self, node: ast.Name) -> None:  # noqa: N802
        word = self._first_word(node)
        if isinstance(node.ctx, ast.Store):
            self._bound[node.id] = word, "name→assignment"
        elif isinstance(node.ctx, ast.Load):
            self._use(node.id, word, is_called=node is self._called)

    def _use(self, name: str, word: int, *, is_called: bool = False) -> None:
        """Link a name to what it is bound by; names of functions and classes only where they are called."""
        binding, relation = self._bound.get(name, (word, ""))
        if binding != word and (is_called or relation != "call→definition"):
            self.links.append(Link(relation, (word,), (binding,)))

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        self._called = node.func
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        # `x += 1` reads x before it binds it.
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._use(node.target.id, self._first_word(node.target))
        self.visit(node.target)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:  # noqa: N802
        self._visit_all([node.type])
        if node.type is not None and node.name is not None:
            # ast does not place the name after `as`: search the words for it.
            word = self._next_word(node.type)
            while self._spelled[word] != node.name:
                word += 1
            self._bound[node.name] = word, "name→assignment"
        self._visit_all(node.body)

    def visit_alias(self, node: ast.alias) -> None:
        if node.name != "*":
            name = node.asname or node.name.split(".")[0]
            word = self._next_word(node) - 1 if node.asname else self._first_word(node)
            self._bound[name] = word, "name→import"
