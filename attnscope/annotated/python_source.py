"""Python source: the links that `tokenize` and `ast` give without any annotation.

    closing→opening      from a closing bracket to the one that it closes
    name→assignment      from a name to its latest assignment (=, for, with, :=, except, comprehensions)
    name→parameter       from a name to the parameter that it is
    name→import          from an imported name to where it is imported
    name→annotation      from a name to the annotation of its latest assignment or parameter, and from that place itself
    call→definition      from the name that is called to its def or class

The latest assignment is the one that stands last before the name in the scope that Python would look it up in; a name
that is bound only further down (as around in a loop), or not in this file, has no link. Words are Python's own tokens,
and of strings and comments the words in them.
"""

import ast
import io
import keyword
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain

from attnscope.annotated.texts import AnnotatedText, AnnotationError, Link, Span
from attnscope.text import word_spans

_PAIRS = {")": "(", "]": "[", "}": "{"}
_NO_WORDS = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING}
_PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
_STRING_ENDS = {getattr(tokenize, name) for name in ("FSTRING_START", "FSTRING_END") if hasattr(tokenize, name)}

# Before Python 3.12 an f-string is one token, and ast misplaces what is in it.
_READS_FSTRINGS = sys.version_info >= (3, 12)


def parse(text: str, source: str) -> AnnotatedText:
    """The links of a file.

    Raises:
        AnnotationError: It does not parse.
    """
    try:
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except SyntaxError as error:
        raise AnnotationError(f"not Python: {error.msg}", error.lineno) from None
    except tokenize.TokenError as error:
        raise AnnotationError(f"not Python: {error.args[0]}", error.args[1][0]) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise AnnotationError(f"not Python: {error}") from None
    lines = [f"{line}\n" for line in text.split("\n")]  # not splitlines, which knows more ends than Python does
    starts = list(accumulate(map(len, lines), initial=0))
    words: list[Span] = []
    kinds: list[str] = []
    brackets: list[tuple[int, str]] = []
    for token in tokens:
        start, stop = (starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type in _PROSE:
            words += [(start + first, start + last) for first, last in word_spans(text[start:stop])]
            kinds += [_kind(token)] * (len(words) - len(kinds))
        elif token.type not in _NO_WORDS and token.string.strip():
            if token.type == tokenize.OP:
                brackets.append((len(words), token.string))
            words.append((start, stop))
            kinds.append(_kind(token))
    scopes = _Scopes(text, lines, starts, words)
    scopes.visit(tree)
    links = (*_brackets(brackets), *scopes.links())
    return AnnotatedText(text, tuple(words), links, source, 1, document=source, kinds=tuple(kinds))


def _kind(token: tokenize.TokenInfo) -> str:
    """What kind of word a token of Python is."""
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "identifier"
    if token.type == tokenize.COMMENT:
        return "comment"
    if token.type in _PROSE or token.type in _STRING_ENDS:
        return "string"
    return "number" if token.type == tokenize.NUMBER else "operator"


def _brackets(operators: list[tuple[int, str]]) -> Iterator[Link]:
    standing: list[tuple[int, str]] = []
    for word, sign in operators:
        if sign in _PAIRS.values():
            standing.append((word, sign))
        elif sign in _PAIRS and standing and standing[-1][1] == _PAIRS[sign]:
            yield Link("closing→opening", (word,), (standing.pop()[0],))


@dataclass(frozen=True)
class _Binding:
    """Where a name gets its meaning: from which character on, by what, and its annotation."""

    start: int
    kind: str
    word: int
    annotation: tuple[int, ...] = ()


@dataclass
class _Scope:
    parent: "_Scope | None"
    is_class: bool = False
    bindings: dict[str, list[_Binding]] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)  # name -> "global" or "nonlocal"


def _args_of(args: ast.arguments) -> list[ast.arg]:
    every = (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg)
    return [arg for arg in every if arg is not None]


class _Scopes(ast.NodeVisitor):
    """Goes through a file and takes down what each scope binds and which names are used where."""

    def __init__(self, text: str, lines: list[str], starts: list[int], words: list[Span]) -> None:
        self._text, self._lines, self._starts, self._words = text, lines, starts, words
        self._by_start = {start: number for number, (start, _) in enumerate(words)}
        self._ordered = [start for start, _ in words]
        self._module = self._scope = _Scope(None)
        self._scopes = [self._module]
        self._uses: list[tuple[str, int, int, _Scope, bool]] = []  # name, word, character, scope, whether it is called

    def links(self) -> Iterator[Link]:
        """The links of all names."""
        for name, word, start, scope, called in self._uses:
            binding = self._latest(name, start, scope)
            if binding is None or binding.word == word:
                continue
            if binding.kind != "definition":
                yield Link(f"name→{binding.kind}", (word,), (binding.word,))
            elif called:
                yield Link("call→definition", (word,), (binding.word,))
            if binding.annotation:
                yield Link("name→annotation", (word,), binding.annotation)
        for scope in self._scopes:
            for binding in chain.from_iterable(scope.bindings.values()):
                if binding.annotation:
                    yield Link("name→annotation", (binding.word,), binding.annotation)

    def _latest(self, name: str, start: int, scope: _Scope) -> _Binding | None:
        at: _Scope | None = self._module if scope.elsewhere.get(name) == "global" else scope
        if scope.elsewhere.get(name) == "nonlocal":
            at = scope.parent
        while at is not None:
            skipped = at.is_class and at is not scope
            if not skipped and name in at.bindings:
                before = [one for one in at.bindings[name] if one.start <= start]
                return max(before, key=lambda one: one.start, default=None)
            at = at.parent
        return None

    # Places

    def _at(self, line: int, column: int) -> int:
        """The character of a place as ast gives it, whose columns count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def _start(self, node: ast.expr | ast.stmt | ast.arg | ast.alias) -> int:
        return self._at(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.stmt | ast.arg | ast.alias) -> int:
        return self._at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _covered(self, node: ast.expr) -> tuple[int, ...]:
        start, stop = self._start(node), self._end(node)
        return tuple(n for n in range(self._next(start), len(self._words)) if self._words[n][0] < stop)

    def _next(self, start: int) -> int:
        """The first word at or after a character."""
        return bisect_right(self._ordered, start - 1)

    def _bind(
        self, name: str, kind: str, start: int, word: int | None, annotation: ast.expr | None = None, since: int = -1
    ) -> None:
        if word is None:
            return
        scope = self._scope
        if scope.elsewhere.get(name) == "global":
            scope = self._module
        noted = self._covered(annotation) if annotation is not None else ()
        # What stands right of an assignment is looked up before it, so that it is valid from its end on.
        scope.bindings.setdefault(name, []).append(_Binding(max(start, since), kind, word, noted))

    # Scopes

    def _visit_all(self, *nodes: ast.AST | None) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    @contextmanager
    def _scope_within(self, *, is_class: bool = False) -> Iterator[None]:
        outer = self._scope
        self._scope = _Scope(outer, is_class)
        self._scopes.append(self._scope)
        yield
        self._scope = outer

    def _visit_body(self, args: ast.arguments, *body: ast.AST) -> None:
        """The body of a function or lambda, in a scope with its parameters."""
        with self._scope_within():
            for arg in _args_of(args):
                start = self._start(arg)
                self._bind(arg.arg, "parameter", start, self._by_start.get(start), arg.annotation)
            self._visit_all(*body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:  # noqa: N802
        self._visit_all(*node.decorator_list, *node.args.defaults, *node.args.kw_defaults)
        self._visit_all(*(arg.annotation for arg in _args_of(node.args)), node.returns)
        self._define(node, 2 if isinstance(node, ast.AsyncFunctionDef) else 1)
        self._visit_body(node.args, *node.body)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  # type: ignore[assignment]

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: N802
        self._visit_all(*node.decorator_list, *node.bases, *node.keywords)
        self._define(node, 1)
        with self._scope_within(is_class=True):
            self._visit_all(*node.body)

    def _define(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, n_keywords: int) -> None:
        word = self._next(self._start(node)) + n_keywords
        self._bind(node.name, "definition", self._words[word][0], word)

    def visit_Lambda(self, node: ast.Lambda) -> None:  # noqa: N802
        self._visit_all(*node.args.defaults, *node.args.kw_defaults)
        self._visit_body(node.args, node.body)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.visit(node.generators[0].iter)
        with self._scope_within():
            start = self._start(node)
            for number, part in enumerate(node.generators):
                self._target(part.target, since=start, before=True)
                self._visit_all(part.iter if number else None, *part.ifs)
            self._visit_all(*((node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)))

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension  # noqa: N815

    def visit_Global(self, node: ast.Global) -> None:  # noqa: N802
        self._scope.elsewhere.update(dict.fromkeys(node.names, "global"))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:  # noqa: N802
        self._scope.elsewhere.update(dict.fromkeys(node.names, "nonlocal"))

    # Bindings

    def _target(self, node: ast.expr, *, since: int, before: bool = False) -> None:
        """Binds the names of an assignment's left side; looks into what else stands there, such as a subscript.

        The names are bound from the character `since` on; with `before` even if they stand further right, as in
        comprehensions.
        """
        if isinstance(node, ast.Name):
            start = self._start(node)
            self._bind(node.id, "assignment", since if before else start, self._by_start.get(start), since=since)
        elif isinstance(node, ast.Tuple | ast.List | ast.Starred):
            for part in [node.value] if isinstance(node, ast.Starred) else node.elts:
                self._target(part, since=since, before=before)
        else:
            self.visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        self.visit(node.value)
        for target in node.targets:
            self._target(target, since=self._end(node))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:  # noqa: N802
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            self._use(node.target)
        self._target(node.target, since=self._end(node))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: N802
        self._visit_all(node.annotation, node.value)
        if isinstance(node.target, ast.Name):
            start = self._start(node.target)
            self._bind(
                node.target.id, "assignment", start, self._by_start.get(start), node.annotation, since=self._end(node)
            )
        else:
            self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:  # noqa: N802
        self.visit(node.value)
        self._target(node.target, since=self._end(node))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:  # noqa: N802
        self.visit(node.iter)
        self._target(node.target, since=self._end(node.iter))
        self._visit_all(*node.body, *node.orelse)

    visit_AsyncFor = visit_For  # noqa: N815  # type: ignore[assignment]

    def visit_withitem(self, node: ast.withitem) -> None:  # noqa: N802
        self.visit(node.context_expr)
        if node.optional_vars is not None:
            self._target(node.optional_vars, since=self._start(node.optional_vars))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:  # noqa: N802
        if node.type is not None:
            self.visit(node.type)
            if node.name is not None:
                word = self._next(self._end(node.type))
                while word < len(self._words) and self._text[slice(*self._words[word])] != node.name:
                    word += 1
                self._bind(node.name, "assignment", self._words[word][0], word)
        self._visit_all(*node.body)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:  # noqa: N802
        for alias in node.names:
            if alias.name == "*":
                continue
            first = self._next(self._start(alias))
            stop = self._end(alias)
            last = max(n for n in range(first, len(self._words)) if self._words[n][0] < stop)
            word, name = (last, alias.asname) if alias.asname else (first, alias.name.split(".")[0])
            self._bind(name, "import", self._words[word][0], word)

    visit_ImportFrom = visit_Import  # noqa: N815  # type: ignore[assignment]

    # Uses

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:  # noqa: N802
        if _READS_FSTRINGS:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        if isinstance(node.func, ast.Name):
            self._use(node.func, called=True)
        else:
            self.visit(node.func)
        self._visit_all(*node.args, *node.keywords)

    def visit_Name(self, node: ast.Name) -> None:  # noqa: N802
        if isinstance(node.ctx, ast.Load):
            self._use(node)

    def _use(self, node: ast.Name, *, called: bool = False) -> None:
        start = self._start(node)
        word = self._by_start.get(start)
        if word is not None:
            self._uses.append((node.id, word, start, self._scope, called))
