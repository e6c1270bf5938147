"""Hugging Face tokenizers as ours: tokens with labels and offsets, chat templates, targets, bare token numbers.

Imports no transformers: it is handed a tokenizer object, and knows what such objects can do.
"""

import contextlib
import itertools
import sys
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from attnscope.errors import AttnscopeError, catch_panics, first_line
from attnscope.models.model import BareTokenizer
from attnscope.models.tokenizer import style_of, tokens_of, unreadable
from attnscope.results.tokens import Tokens
from attnscope.text import Style, build_tokens, require_tokenizable

Spans = list[tuple[int, int]]


class HuggingFaceTokenizer:
    """A tokenizer of transformers that returns Tokens: whole texts, never cut and never padded.

    Attributes:
        note: What a user must know of it; may be empty.
        type_ids: What the model reads as segment of some special tokens instead of the text's number (XLNet's and
            Funnel's [CLS]): token number -> segment.
    """

    def __init__(self, backend: Any) -> None:
        self.name = f"{type(backend).__name__}, {len(backend):,} pieces"
        self.backend, self._style, self.note = backend, _style(backend), ""
        if not backend.is_fast:
            self.note = "The tokenizer has no fast version: offsets are rebuilt where they can be."
        self.type_ids = self._odd_type_ids()

    @property
    def mask_id(self) -> int | None:
        """Return the number of the token that stands for a hidden one; None where there is none."""
        number = getattr(self.backend, "mask_token_id", None)
        return number if isinstance(number, int) else None

    @property
    def unknown_id(self) -> int | None:
        """Return the number of the token that stands for what the vocabulary lacks; None where nothing is unknown."""
        number = getattr(self.backend, "unk_token_id", None)
        return number if isinstance(number, int) else None

    @property
    def prefix_ids(self) -> list[int]:
        """Return what it puts before a transcript, the start token first.

        Empty for tokenizers that are not of speech.
        """
        return [int(number) for number in getattr(self.backend, "prefix_tokens", None) or ()]

    def ordinary_ids(self) -> list[int]:
        """Return the numbers of all tokens that stand for text, in order.

        No special ones, none that are kept unused.
        """
        special = set(self.backend.all_special_ids)
        vocabulary = self.backend.get_vocab().items()
        return sorted(number for piece, number in vocabulary if number not in special and "unused" not in piece)

    def spell(self, number: int) -> str:
        """Return the text of one token."""
        return f"<{number}>" if self._piece(number) is None else str(self.backend.decode([number]))

    def encode(self, text: str, pair: str | None = None, *, is_whole: bool = False) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects.

        None is added to a whole text: they stand in it.
        """
        if not self.backend.is_fast:
            return self._encode_slow(text, pair, add_special_tokens=not is_whole)
        encoding = self._call(text, pair, not is_whole, return_offsets_mapping=True).encodings[0]
        return tokens_of(encoding, text, pair, self._style, self._special(encoding.ids) if is_whole else None)

    @property
    def chat(self) -> Callable[[str], Tokens] | None:
        """Put a text as the user's message into the model's chat template, and tokenises what comes of it.

        The template writes the tokens that begin a text; none is added a second time.
        """
        write = self.write_chat
        if write is None:
            return None
        return lambda text: self.encode(
            write([{"role": "user", "content": text}], add_generation_prompt=True), is_whole=True
        )

    @property
    def write_chat(self) -> Callable[..., str] | None:
        """Write messages, each with `role` and `content`, by the model's chat template; None where there is none."""
        return self._write_chat if getattr(self.backend, "chat_template", None) else None

    def _write_chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        try:
            with limit_template():
                return str(self.backend.apply_chat_template(messages, tokenize=False, **more))
        except Exception as error:  # templates are programs, and raise what they like
            raise AttnscopeError(f"the chat template fails: {first_line(error)}", "leave out --chat") from error

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return what a decoder reads that is to write `text`: the start token, then the text without its end token.

        `ends` are the numbers that end a text. The decoder writes such a token and never reads it.
        """
        require_tokenizable(text)
        try:
            with catch_panics():
                ids = list(self.backend(text_target=text)["input_ids"])
        except Exception as error:
            raise AttnscopeError(f"the tokenizer cannot read the target: {first_line(error)}") from error
        if ids and ids[0] == start:  # Whisper's says it itself
            ids = ids[1:]
        # Some tokenizers add no end token, and then the last token is the text's own.
        if ids and (ids[-1] in ends or self._special(ids)[-1]):
            ids = ids[:-1]
        spans = align(text, self._pieces(ids), self._special(ids), self.backend.unk_token)
        spans = None if spans is None else [(0, 0), *spans]
        return self._build(text, [start, *ids], spans, [True, *self._special(ids)])

    def encode_ids(self, ids: Sequence[int]) -> Tokens:
        """Tokens of numbers, where there is no text: the text is what the tokenizer decodes."""
        ids = [int(number) for number in ids]
        text, spans = self._decode(ids)
        return self._build(text, ids, spans)

    def encode_among(self, ids: Sequence[int], elsewhere: Mapping[int, str], n_given: int) -> Tokens:
        """Tokens of numbers of which some stand for parts of pictures: `elsewhere` are their places, and what to show.

        The model itself wrote those after the first `n_given`.
        """
        ids = [int(number) for number in ids]
        text = ""
        spans = [(0, 0)] * len(ids)
        has_spans = True
        breaks = [i for i in range(len(ids)) if i in elsewhere]  # written tokens go on where the prompt ended
        for start, stop in itertools.pairwise([0, *breaks, len(ids)]):
            start += start in elsewhere
            if start >= stop:
                continue
            run, own_spans = self._decode(ids[start:stop])
            has_spans = has_spans and own_spans is not None
            spans[start:stop] = [(a + len(text), b + len(text)) for a, b in own_spans or [(0, 0)] * (stop - start)]
            text += run
        special = [added or i in elsewhere for i, added in enumerate(self._special(ids))]
        tokens = self._build(text, ids, spans if has_spans else None, special)
        labels = tuple(elsewhere.get(i, label) for i, label in enumerate(tokens.labels))
        return replace(tokens, labels=labels, n_given=n_given)

    def extend(self, tokens: Tokens, written: Sequence[int]) -> Tokens:
        """Tokens of a text and of what a model wrote after it; `n_given` says where that begins."""
        before = tokens.ids.tolist()
        written = [int(number) for number in written]
        whole, spans = self._decode([*before, *written])
        head, _ = self._decode(before)
        text = tokens.text
        offsets = None
        if whole.startswith(head):
            text += whole[len(head) :]
            if spans is not None and tokens.words is not None:
                shift = len(tokens.text) - len(head)
                later = [(max(a + shift, 0), max(b + shift, 0)) for a, b in spans[len(before) :]]
                offsets = [*((int(a), int(b)) for a, b in tokens.offsets), *later]
        special = [*tokens.special.tolist(), *self._special(written)]
        return replace(self._build(text, [*before, *written], offsets, special), n_given=len(before))

    def _build(
        self, text: str, ids: Sequence[int], spans: Spans | None, special: Sequence[bool] | None = None, **more: Any
    ) -> Tokens:
        special = self._special(ids) if special is None else special
        pieces = self._pieces(ids)
        return build_tokens(text, ids=ids, pieces=pieces, offsets=spans, special=special, style=self._style, **more)

    def _decode(self, ids: list[int]) -> tuple[str, Spans | None]:
        """Return the text of token numbers, and where each stands in it.

        What a token adds to the text of those before it.

        A token that ends within a character adds nothing; the one that completes it adds it. Nor does one add anything
        that the tokenizer does not know.
        """
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        in_vocabulary = [self._piece(number) is not None for number in ids]

        def decode(n: int) -> str:
            return str(self.backend.decode(list(itertools.compress(ids[:n], in_vocabulary)), **options))

        text = decode(len(ids))
        ends = []
        for i in range(len(ids)):
            start = decode(i + 1).rstrip("\ufffd")
            if not text.startswith(start):
                return text, None
            ends.append(len(start))
        return text, list(zip([0, *ends[:-1]], ends, strict=True))

    def _encode_slow(self, text: str, pair: str | None, *, add_special_tokens: bool) -> Tokens:
        ids = list(self._call(text, pair, add_special_tokens)["input_ids"])
        special = self._special(ids)
        pieces = self._pieces(ids)
        segments = [0] * len(ids)
        if pair is not None:
            segments = self._slow_segments(text, pair, ids, special)
        spans: Spans | None = []
        for number, part in enumerate((text, pair)):
            places = [i for i, segment in enumerate(segments) if segment == number]
            if part is None or spans is None:
                continue
            own = align(part, [pieces[i] for i in places], [special[i] for i in places], self.backend.unk_token)
            spans = None if own is None else [*spans, *own]
        return self._build(text, ids, spans, special, segments=segments, pair=pair)

    def _call(self, text: str, pair: str | None, add_special_tokens: bool, **more: Any) -> Any:
        require_tokenizable(text, pair)
        try:
            with catch_panics():
                return self.backend(text, pair, add_special_tokens=add_special_tokens, verbose=False, **more)
        except Exception as error:
            raise unreadable(pair, error) from error

    def _slow_segments(self, text: str, pair: str, ids: list[int], special: list[bool]) -> list[int]:
        """Return which text each token of a pair belongs to; special ones go with the text before them."""
        n_first = len(self._call(text, None, False)["input_ids"])
        n_second = len(self._call(pair, None, False)["input_ids"])
        own = [i for i, added in enumerate(special) if not added]
        if len(own) != n_first + n_second:
            raise AttnscopeError("this model's tokenizer reads a pair otherwise than its two texts", "leave out --pair")
        boundary = own[n_first] if n_second else len(ids)
        return [int(i >= boundary) for i in range(len(ids))]

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._piece(number) or "" for number in ids]

    def _piece(self, number: int) -> str | None:
        """Return a token as the vocabulary writes it; None where a model knows more numbers than its tokenizer."""
        try:
            piece = self.backend.convert_ids_to_tokens(int(number))
        except (IndexError, KeyError, OverflowError):
            return None
        return None if piece is None else str(piece)

    def _special(self, ids: Sequence[int]) -> list[bool]:
        special = set(self.backend.all_special_ids)
        special |= {number for number, token in self.backend.added_tokens_decoder.items() if token.special}
        unknown = self.backend.unk_token_id
        return [number in special and number != unknown for number in ids]

    def _odd_type_ids(self) -> dict[int, int]:
        if "token_type_ids" not in self.backend.model_input_names:
            return {}
        try:
            encoded = self.backend("a", "b", verbose=False)
            types = encoded["token_type_ids"]
            tokens = self.encode("a", "b")
        except (AttnscopeError, ValueError, NotImplementedError, KeyError):
            return {}
        return {
            int(number): int(kind)
            for number, kind, segment in zip(tokens.ids, types, tokens.segments, strict=True)
            if kind not in (0, 1) and kind != segment
        }


MOST_STEPS = 1_000_000
"""Lines of Python that a chat template may run, as Jinja compiles it: it is a program, and may never end."""

MOST_MADE = 10_000_000
"""Characters, items or bits that one product or power in a chat template may make: no step would end it."""

_limiting = threading.RLock()
"""Held while Jinja's own class is changed. Threads at once would leave it changed, or lift each other's limit."""


@contextlib.contextmanager
def limit_template() -> Iterator[None]:
    """Within it, a chat template can neither run for ever nor fill the memory: else it raises RuntimeError.

    This thread runs MOST_STEPS lines of Python at most, and templates make nothing huge by `*` and `**`. Threads take
    turns.
    """
    from jinja2.sandbox import SandboxedEnvironment

    sandbox: Any = SandboxedEnvironment
    n_left = itertools.count(MOST_STEPS, -1)

    def step(_: Any, event: str, __: Any) -> Any:
        if event == "line" and next(n_left) <= 0:
            raise RuntimeError(f"it does not end within {MOST_STEPS:,} steps")
        return step

    with _limiting:
        tracing = sys.gettrace()
        plain = sandbox.call_binop
        intercepted = sandbox.intercepted_binops

        def compute(self: Any, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _size_made(operator, left, right) > MOST_MADE:
                raise RuntimeError(f"it makes something of more than {MOST_MADE:,} characters, items or bits")
            return plain(self, context, operator, left, right)

        sandbox.call_binop = compute
        sandbox.intercepted_binops = intercepted | {"*", "**"}
        sys.settrace(step)
        try:
            yield
        finally:
            sys.settrace(tracing)
            sandbox.call_binop = plain
            sandbox.intercepted_binops = intercepted


def _size_made(operator: str, left: Any, right: Any) -> int:
    """Return how many characters, items or bits a product or power has, about; 0 for what is never large."""
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    many, times = (right, left) if isinstance(left, int) else (left, right)
    return len(many) * max(0, times) if isinstance(times, int) and hasattr(many, "__len__") else 0


class NumbersTokenizer(BareTokenizer):
    """Stands in where a model comes without a tokenizer: its texts are token numbers, such as "17 5 9"."""

    name = "none"
    note = "There is no tokenizer: texts are given as token numbers."
    type_ids: dict[int, int] = {}  # noqa: RUF012
    prefix_ids: tuple[int, ...] = ()

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Read token numbers; refuses anything else."""
        numbers = text.replace(",", " ").split()
        if pair is not None or not numbers or not all(number.isdecimal() for number in numbers):
            raise AttnscopeError("this model has no tokenizer", "give token numbers instead of a text, such as: 17 5 9")
        return self.encode_ids([int(number) for number in numbers])

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return the start token, then the numbers without one that ends a text."""
        numbers = self.encode(text).ids.tolist()
        if numbers[-1] in ends:
            numbers = numbers[:-1]
        return self.encode_ids([start, *numbers])

    def encode_ids(self, ids: Sequence[int]) -> Tokens:
        """Tokens of numbers, labelled "#17"."""
        pieces = [f"#{number}" for number in ids]
        ends = np.cumsum([len(piece) + 1 for piece in pieces]) - 1
        return build_tokens(
            " ".join(pieces),
            ids=[int(number) for number in ids],
            pieces=pieces,
            offsets=[(int(end) - len(piece), int(end)) for end, piece in zip(ends, pieces, strict=True)],
            special=[False] * len(pieces),
            style="plain",
        )

    def encode_among(self, ids: Sequence[int], elsewhere: Mapping[int, str], n_given: int) -> Tokens:
        """See HuggingFaceTokenizer."""
        tokens = self.encode_ids(ids)
        labels = tuple(elsewhere.get(i, label) for i, label in enumerate(tokens.labels))
        special = np.isin(np.arange(len(labels)), list(elsewhere))
        return replace(tokens, labels=labels, special=special, n_given=n_given)

    def extend(self, tokens: Tokens, written: Sequence[int]) -> Tokens:
        """Tokens of numbers and of those that a model wrote after them."""
        return replace(self.encode_ids([*tokens.ids.tolist(), *written]), n_given=len(tokens))


class WordlessTokenizer(NumbersTokenizer):
    """Stands in where a model reads no text; says what it reads instead, and how it is given that."""

    name = "none: it reads no text"
    note = ""

    def __init__(self, model: str, what: str, option: str) -> None:
        self._message = f"{model} {what}", option

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Refuses."""
        raise AttnscopeError(*self._message)


def _style(backend: Any) -> Style:
    inner = getattr(backend, "backend_tokenizer", None) or getattr(backend, "_tokenizer", None)
    style: Style = "plain" if inner is None else style_of(inner)
    if style == "bytes" or hasattr(backend, "byte_decoder"):
        return "bytes"
    return "sentencepiece" if hasattr(backend, "sp_model") else style


# Where pieces stand in their text -----------------------------------------------------------------------------------


def align(text: str, pieces: Sequence[str], special: Sequence[bool], unknown: str | None) -> Spans | None:
    """(first, last + 1) of each piece in the text, (0, 0) for special ones; None if they cannot be found.

    Each piece is sought where the one before it ended, white space passed over: as it is, then without marks of word
    pieces and spaces, compared without case and accents. An unknown piece takes the text up to the next known one.
    """
    spans = _align_bytes(text, pieces, special)
    return spans if spans is not None else _align_characters(text, pieces, special, unknown)


def _align_bytes(text: str, pieces: Sequence[str], special: Sequence[bool]) -> Spans | None:
    """For vocabularies of single bytes (ByT5): piece i is byte i."""
    own = [piece for piece, added in zip(pieces, special, strict=True) if not added]
    if not own or not all(len(piece) == 1 and ord(piece) < 256 for piece in own):
        return None
    if bytes(map(ord, own)) != text.encode():
        return None
    places = iter([i for i, char in enumerate(text) for _ in char.encode()])
    return [(0, 0) if added else (place := next(places), place + 1) for added in special]


def _align_characters(text: str, pieces: Sequence[str], special: Sequence[bool], unknown: str | None) -> Spans | None:
    folded, origin = _fold(text)
    place = 0
    spans: Spans = []
    waiting: int | None = None
    for i, (piece, added) in enumerate(zip(pieces, special, strict=True)):
        if not added and piece == unknown:
            if waiting is not None:
                return None
            waiting = i
        if added or piece == unknown:
            spans.append((0, 0))
            continue
        bare = _fold(_strip_marks(piece))[0].strip()
        while place < len(folded) and folded[place].isspace():
            place += 1
        if not bare:
            spans.append((0, 0))
            continue
        if waiting is not None:
            start = folded.find(bare, place + 1)
            if start < 0:
                return None
            end = len(folded[:start].rstrip())
            spans[waiting] = (origin[place], origin[end - 1] + 1)
            place = start
            waiting = None
        elif not folded.startswith(bare, place):
            return None
        spans.append((origin[place], origin[place + len(bare) - 1] + 1))
        place += len(bare)
    rest = folded[place:].strip()
    if waiting is not None and rest:
        start = place + (len(folded[place:]) - len(folded[place:].lstrip()))
        spans[waiting] = (origin[start], origin[start + len(rest) - 1] + 1)
    elif rest:
        return None
    return spans


def _fold(text: str) -> tuple[str, list[int]]:
    """Return a text without case and accents, and the place in it that each character came from."""
    folded = []
    origin = []
    for i, char in enumerate(text):
        for part in unicodedata.normalize("NFKD", char).casefold():
            if not unicodedata.combining(part):
                folded.append(part)
                origin.append(i)
    return "".join(folded), origin


def _strip_marks(piece: str) -> str:
    """Return a piece without the marks of WordPiece, SentencePiece and BPE vocabularies."""
    if len(piece) > 2:
        piece = piece.removeprefix("##").removesuffix("@@")
    return piece.removesuffix("</w>").replace("▁", " ").replace("Ġ", " ")
