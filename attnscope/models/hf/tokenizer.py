"""Hugging Face tokenizers as ours: tokens with labels and offsets, chat templates, targets, bare token numbers.

Imports no transformers: it is handed a tokenizer object, and knows what such objects can do.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnscope.errors import AttnscopeError, as_failure
from attnscope.models.model import Tokenizer
from attnscope.models.tokenizer import style_of, tokens_of_encoding
from attnscope.results.tokens import Tokens
from attnscope.text import Style, build_tokens, require_tokenizable

Spans = list[tuple[int, int]]
"""Where each token stands in a text: its first character and the one after its last; (0, 0) = nowhere."""


class _TokensOfNumbers(Tokenizer):
    """Makes Tokens of token numbers; where no more is known of them, they are written as "#5".

    Attributes:
        note: What a user must know of it; may be empty.
        prefix_ids: The numbers that it puts before a transcript, the start token first; empty for tokenizers that are
            not of speech.
    """

    note = ""
    prefix_ids: Sequence[int] = ()
    _style: Style = "plain"

    def encode_ids(self, ids: Sequence[int]) -> Tokens:
        """Return the Tokens of token numbers without a text: the text is their decoding."""
        return self.encode_among(ids, {})

    def encode_among(self, ids: Sequence[int], labels: Mapping[int, str], n_given: int = -1) -> Tokens:
        """Return Tokens of numbers of which some stand for parts of pictures.

        Args:
            ids: The numbers.
            labels: Position of a number that stands for a part of a picture -> its label.
            n_given: How many of the numbers were given; the model itself wrote the others. -1 = it wrote none.
        """
        ids = [int(number) for number in ids]
        # Decode the runs between pictures, and shift their spans to where each run starts in the text.
        text = ""
        spans: Spans | None = [(0, 0)] * len(ids)
        for before, after in itertools.pairwise([-1, *sorted(labels), len(ids)]):
            run, run_spans = self._decode(ids[before + 1 : after])
            if run_spans is None or spans is None:
                spans = None
            else:
                shift = len(text)
                spans[before + 1 : after] = [(first + shift, end + shift) for first, end in run_spans]
            text += run
        special = self._special(ids)
        for position in labels:
            special[position] = True
        tokens = self._build(text, ids, spans, special)
        all_labels = tuple(labels.get(i, label) for i, label in enumerate(tokens.labels))
        return replace(tokens, labels=all_labels, n_given=n_given)

    def extend(self, tokens: Tokens, written: Sequence[int]) -> Tokens:
        """Return the Tokens of a text and of the numbers written after it; `n_given` is where these begin."""
        # Decode the whole: a character may be split between the last given token and the first written one.
        before = tokens.ids.tolist()
        ids = [*before, *map(int, written)]
        whole, spans = self._decode(ids)
        head, _ = self._decode(before)
        text = tokens.text
        offsets = None
        if whole.startswith(head):
            text += whole[len(head) :]
            if spans is not None and tokens.words is not None:
                # The text that was given may differ from what its tokens decode to: written ones follow it.
                shift = len(tokens.text) - len(head)
                offsets = [(int(first), int(end)) for first, end in tokens.offsets]
                offsets += [
                    (max(first + shift, 0), max(end + shift, 0)) for first, end in spans[len(before) :]
                ]
        special = [*tokens.special.tolist(), *self._special(ids[len(before) :])]
        return replace(self._build(text, ids, offsets, special), n_given=len(before))

    def _build(
        self, text: str, ids: Sequence[int], spans: Spans | None, special: Sequence[bool]
    ) -> Tokens:
        return build_tokens(
            text, ids=ids, pieces=self._pieces(ids), offsets=spans, special=special, style=self._style
        )

    def _decode(self, ids: Sequence[int]) -> tuple[str, Spans | None]:
        """Return the text of token numbers, and where each stands in it."""
        text = ""
        spans: Spans = []
        for piece in self._pieces(ids):
            if text:
                text += " "
            spans.append((len(text), len(text) + len(piece)))
            text += piece
        return text, spans

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """Return how each token is written in the vocabulary."""
        return [f"#{number}" for number in ids]

    def _special(self, ids: Sequence[int]) -> list[bool]:
        """Return which tokens are special: they stand for no text."""
        return [False] * len(ids)


class HuggingFaceTokenizer(_TokensOfNumbers):
    """A tokenizer of transformers that returns Tokens: whole texts, never cut and never padded."""

    def __init__(self, backend: Any) -> None:
        self.name = f"{type(backend).__name__}, {len(backend):,} pieces"
        self.backend = backend
        self.mask_id = getattr(backend, "mask_token_id", None)
        self.unknown_id = getattr(backend, "unk_token_id", None)
        self.prefix_ids = [int(number) for number in getattr(backend, "prefix_tokens", None) or ()]
        # How pieces are written: a fast tokenizer says so by its parts, a slow one by its attributes.
        inner = getattr(backend, "backend_tokenizer", None) or getattr(backend, "_tokenizer", None)
        if inner is not None:
            self._style = style_of(inner)
        elif hasattr(backend, "byte_decoder"):
            self._style = "bytes"
        elif hasattr(backend, "sp_model"):
            self._style = "sentencepiece"
        if not backend.is_fast:
            self.note = (
                "The tokenizer has no fast version: it does not say where tokens stand in the text."
            )

    def ordinary_ids(self) -> list[int]:
        """Return the numbers of all tokens that stand for text, in order: no special ones, none kept unused."""
        vocabulary = self.backend.get_vocab().items()
        numbers = {number for piece, number in vocabulary if "unused" not in piece}
        return sorted(numbers - {*self.backend.all_special_ids})

    def spell(self, number: int) -> str:
        """Return the text of one token."""
        return f"<{number}>" if self._piece(number) is None else str(self.backend.decode([number]))

    def encode(self, text: str, pair: str | None = None, *, is_whole: bool = False) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects.

        A text that is whole has them already.
        """
        options = {
            "add_special_tokens": not is_whole,
            "verbose": False,
            "return_offsets_mapping": self.backend.is_fast,
        }
        if not self.backend.is_fast and pair is not None:
            raise AttnscopeError(
                "this model's tokenizer has no fast version, and reads no pairs", "leave out --pair"
            )
        require_tokenizable(text, pair)
        with as_failure("the tokenizer cannot read this text", "give another text"):
            encoded = self.backend(text, pair, **options)
        if self.backend.is_fast:
            encoding = encoded.encodings[0]
            special = self._special(encoding.ids) if is_whole else None
            return tokens_of_encoding(encoding, text, pair, self._style, special)
        ids = list(encoded["input_ids"])
        return self._build(text, ids, self._spans_in(text, ids), self._special(ids))

    @property
    def chat(self) -> Callable[[str], Tokens] | None:
        """Return a function that tokenises a text as the user's message in the model's chat template; None without one.

        The template writes the tokens that begin a text; none is added a second time.
        """
        return self._encode_chat if self.write_chat else None

    def _encode_chat(self, text: str) -> Tokens:
        message = {"role": "user", "content": text}
        return self.encode(self._write_chat([message], add_generation_prompt=True), is_whole=True)

    @property
    def write_chat(self) -> Callable[..., str] | None:
        """Return a function that writes messages by the chat template; None without one.

        Each message has `role` and `content`.
        """
        return self._write_chat if getattr(self.backend, "chat_template", None) else None

    def _write_chat(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        with as_failure("the chat template fails", "leave out --chat"):
            return str(self.backend.apply_chat_template(messages, tokenize=False, **more))

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return the decoder's tokens for `text` as its output: the start token, then the text without its end token.

        `ends` are the numbers that end a text. The decoder writes such a token and never reads it.
        """
        # Tokenise as a target: Marian and M2M have other special tokens there.
        require_tokenizable(text)
        is_fast = self.backend.is_fast
        with as_failure("the tokenizer cannot read the target"):
            encoding = self.backend(text_target=text, return_offsets_mapping=is_fast)
        ids = list(encoding["input_ids"])
        special = self._special(ids)
        spans = encoding["offset_mapping"] if is_fast else self._spans_in(text, ids)
        if spans is None:
            spans = [(0, 0)] * len(ids)
        # Leave out what is not the text's own. Whisper's tokenizer adds the start token; some add no end token.
        first = 1 if ids[:1] == [start] else 0
        end = len(ids)
        if end > first and (ids[-1] in ends or special[-1]):
            end -= 1
        return self._build(
            text, [start, *ids[first:end]], [(0, 0), *spans[first:end]], [True, *special[first:end]]
        )

    def _decode(self, ids: Sequence[int]) -> tuple[str, Spans | None]:
        """Return the text of token numbers, and where each stands in it: what it adds to the text of those before it.

        A token that ends within a character adds nothing; the one that completes the character adds it whole. Numbers
        that the tokenizer does not know add nothing.
        """
        # Models may have more numbers than the tokenizer.
        in_vocabulary = [self._piece(number) is not None for number in ids]

        def decode(n: int) -> str:
            known = list(itertools.compress(ids[:n], in_vocabulary))
            return str(
                self.backend.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )

        text = decode(len(ids))
        # Decode each prefix: its length is where the next token starts. U+FFFD marks half a character.
        starts = [decode(n).rstrip("\ufffd") for n in range(len(ids) + 1)]
        if not all(text.startswith(start) for start in starts):
            return text, None
        return text, list(itertools.pairwise(map(len, starts)))

    def _spans_in(self, text: str, ids: Sequence[int]) -> Spans | None:
        """Return where tokens stand in a text if they decode to it, as those of single bytes (ByT5) do; else None."""
        decoded, spans = self._decode(ids)
        return spans if decoded.startswith(text) else None

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
        special = {*self.backend.all_special_ids}
        for number, token in self.backend.added_tokens_decoder.items():
            if token.special:
                special.add(number)
        special.discard(self.unknown_id)
        return [number in special for number in ids]


class NumbersTokenizer(_TokensOfNumbers):
    """Stands in where a model comes without a tokenizer: its texts are token numbers, such as "17 5 9"."""

    name = "none"
    note = "There is no tokenizer: texts are given as token numbers."

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Read token numbers, separated by spaces or commas; refuse anything else."""
        numbers = text.replace(",", " ").split()
        if pair is not None or not numbers or not all(number.isdecimal() for number in numbers):
            raise AttnscopeError(
                "this model has no tokenizer", "give token numbers instead of a text, such as: 17 5 9"
            )
        return self.encode_ids([int(number) for number in numbers])

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return the start token, then the numbers without one that ends a text."""
        numbers = self.encode(text).ids.tolist()
        if numbers[-1] in ends:
            numbers = numbers[:-1]
        return self.encode_ids([start, *numbers])


class WordlessTokenizer(NumbersTokenizer):
    """Stands in where a model reads no text; its message says what the model reads, the hint how it is given that."""

    name = "none: it reads no text"
    note = ""

    def __init__(self, message: str, hint: str) -> None:
        self._message = message
        self._hint = hint

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Refuse a text."""
        raise AttnscopeError(self._message, self._hint)
