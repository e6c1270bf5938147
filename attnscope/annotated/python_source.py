"""Parse Python source into a text with links between its brackets and names, by `tokenize` and `ast`.

    closing→opening      from a closing bracket to its opening bracket
    name→assignment      from a name to its latest assignment (=, for, with, :=, except, comprehensions)
    name→parameter       from the name of a parameter, in the function's body, to the parameter in its signature
    name→import          from an imported name to its import
    call→definition      from the name of a called function or class to its def or class

To find the latest assignment, the source is walked once from top to bottom, each statement in Python's order of
evaluation. Branches and loops are not followed. The latest assignment is the last one in this walk before the name, in
the same function or an enclosing one. A name has no link if this walk finds no assignment before it, or if it is in an
f-string. Words are Python's tokens. Strings and comments are split into words as other texts are.
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

_LAYOUT_TYPES = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
"""Types of tokens that are no words."""

# Python 3.12 has a token type for the text in an f-string. For earlier versions, the default adds nothing to the set.
_PROSE_TYPES = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
"""Types of tokens that hold prose: they are split into words."""

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

_SCOPES = (*_DEFINITIONS, ast.Lambda)
"""Types of nodes whose body has names of its own."""

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
    # An f-string is not visited: before Python 3.12, nodes in it have wrong positions.
    ast.JoinedStr: (),
    # The name is bound before the body is visited, although Python binds it later: so recursive calls are linked.
    **dict.fromkeys(
        _DEFINITIONS, ("decorator_list", "bases", "keywords", "args", "returns", "name", "body")
    ),
}
"""The fields to visit, in Python's order of evaluation, of types of nodes whose `_fields` have another order."""

_CALL = "call→definition"

_RELATION_BY_TYPE = dict.fromkeys(_DEFINITIONS, _CALL) | {ast.ExceptHandler: "name→assignment"}
"""The types of nodes that bind the string in their field `name`, and the relation of links to this name."""


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

    # The index of each line's first character in the text. (splitlines would also split at form feeds.)
    line_lengths = [len(line) + 1 for line in text.split("\n")]
    line_starts = list(accumulate(line_lengths, initial=0))
    # Find the words, and link brackets. Brackets match, because the file parses.
    words: list[Span] = []
    links: list[Link] = []
    # The words that are opening brackets, and are not closed yet.
    open_brackets: list[int] = []
    for token in tokens:
        start, stop = (line_starts[row - 1] + column for row, column in (token.start, token.end))
        if token.type in _PROSE_TYPES:
            # Spans in the prose become spans in the text.
            words += [
                (start + word_start, start + word_stop)
                for word_start, word_stop in word_spans(text[start:stop])
            ]
            continue
        if token.type in _LAYOUT_TYPES or not token.string.strip():
            continue
        # This token becomes the next word, which has the index len(words).
        if token.string in ("(", "[", "{"):
            open_brackets.append(len(words))
        elif token.string in (")", "]", "}"):
            links.append(Link("closing→opening", (len(words),), (open_brackets.pop(),)))
        words.append((start, stop))

    name_linker = _NameLinker(text, line_starts, words)
    name_linker.visit(tree)
    links += name_linker.links
    # Each file is a document of its own.
    return AnnotatedText(text, tuple(words), tuple(links), source, line, document=source)


class _NameLinker(ast.NodeVisitor):
    """Visit a file in Python's order of evaluation, and link names to the words that bind them.

    Args:
        text: The file.
        line_starts: The index of each line's first character in the text.
        words: The span of each word in the text.

    Attributes:
        links: The links found so far.
    """

    def __init__(self, text: str, line_starts: Sequence[int], words: Sequence[Span]) -> None:
        self.links: list[Link] = []
        self._text = text
        self._line_starts = line_starts
        self._word_starts = [start for start, _ in words]
        # Python normalises names to NFKC, and so names in `ast` are normalised.
        self._normalised_words = [
            unicodedata.normalize("NFKC", text[start:stop]) for start, stop in words
        ]
        # The latest binding of each name: (index of the word that binds it, relation of links to that word). There is
        # one map for each scope that is open; an inner scope falls back on the enclosing ones.
        self._bindings: ChainMap[str, tuple[int, str]] = ChainMap()
        # The function expression of the latest call, such as the node of `f` in f(x). It shows which names are called.
        self._called: ast.expr | None = None

    def generic_visit(self, node: ast.AST) -> None:
        """Visit the children of a node in the order of evaluation; the body of a function or class opens a scope.

        `ast.NodeVisitor` calls this for each type of node without a method `visit_…` of its own.
        """
        outer_bindings = self._bindings
        relation = _RELATION_BY_TYPE.get(type(node))
        for field in _EVALUATION_ORDER.get(type(node), node._fields):
            value = getattr(node, field, None)
            if field == "name" and value and relation:
                self._bind(value, node, relation)
            elif field == "body" and isinstance(node, _SCOPES):
                # Decorators, defaults and annotations come before the body, and so outside of its scope.
                self._bindings = outer_bindings.new_child()
                # A function's parameters are the `ast.arg` nodes in its field `args`. A class has no such field, and no
                # `ast.arg` among its own children: the loop then binds nothing.
                for parameter in ast.iter_child_nodes(getattr(node, "args", node)):
                    if isinstance(parameter, ast.arg):
                        self._bind(parameter.arg, parameter, "name→parameter")
            children = value if isinstance(value, list) else [value]
            for child in children:
                if isinstance(child, ast.AST):
                    self.visit(child)
        # The scope ends with the node.
        self._bindings = outer_bindings

    def _find_word(self, name: str, node: ast.AST) -> int:
        """Return the index of the first word that spells a name at or after the start of a node."""
        row: int = node.lineno - 1  # type: ignore[attr-defined]
        n_bytes: int = node.col_offset  # type: ignore[attr-defined]
        # `ast` gives the column in bytes of UTF-8: count the characters in these bytes. (As many characters as bytes
        # are enough of the line to hold them.)
        line_start = self._line_starts[row]
        prefix = self._text[line_start : line_start + n_bytes].encode()[:n_bytes].decode()
        first_word = bisect_left(self._word_starts, line_start + len(prefix))
        return self._normalised_words.index(name, first_word)

    def _bind(self, name: str, node: ast.AST, relation: str) -> None:
        """Bind a name in the current scope to the word that spells it in a node."""
        self._bindings[name] = self._find_word(name, node), relation

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
            target_word, relation = self._bindings[node.id]
            if relation != _CALL or node is self._called:
                word = self._find_word(node.id, node)
                self.links.append(Link(relation, (word,), (target_word,)))
