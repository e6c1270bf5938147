"""Turn texts into Tokens by a Hugging Face tokenizer: plain texts, chat messages and targets; and token ids alone.

Imports no transformers: it is handed a tokenizer object, and relies on the methods of such objects.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from attnscope.errors import AttnscopeError, as_failure
from attnscope.models.model import Tokenizer
from attnscope.models.tokenizer import detect_piece_style
from attnscope.results.tokens import Tokens
from attnscope.text import PieceStyle, build_tokens, require_tokenizable, tokens_of_encoding

Spans = list[tuple[int, int]]
"""The (start, end) of each token in a text, in characters; (0, 0) = it stands for no character."""


class _IdTokenizer(Tokenizer):
    """A tokenizer that makes Tokens of token ids; without a vocabulary, it writes the token with id 5 as "#5".

    Attributes:
        note: What a user must know of it; may be empty.
        prefix_ids: The ids that it puts before a transcript, the start token first; empty for tokenizers that are not
            of speech.
    """

    note = ""
    prefix_ids: Sequence[int] = ()
    _style: PieceStyle = "plain"

    def encode_ids(
        self, ids: Sequence[int], picture_labels: Mapping[int, str] = {}, n_given: int = -1
    ) -> Tokens:
        """Return the Tokens of token ids; their text is what the ids decode to.

        Args:
            ids: The ids.
            picture_labels: Position of an id that stands for a part of a picture -> its label. It decodes to no text.
            n_given: How many of the ids were given; the model wrote those after them. -1 = it wrote none.
        """
        # Decode the ids between pictures, run by run. The spans of a run count from its start in the text.
        text = ""
        spans: Spans | None = [(0, 0)] * len(ids)
        for picture, next_picture in itertools.pairwise([-1, *sorted(picture_labels), len(ids)]):
            run = slice(picture + 1, next_picture)
            run_text, run_spans = self._decode(ids[run])
            if run_spans is None or spans is None:
                spans = None
            else:
                run_start = len(text)
                spans[run] = [(run_start + start, run_start + end) for start, end in run_spans]
            text += run_text
        special = self._special(ids)
        for position in picture_labels:
            special[position] = True
        tokens = self._build(text, ids, spans, special)
        labels = tuple(picture_labels.get(i, label) for i, label in enumerate(tokens.labels))
        return replace(tokens, labels=labels, n_given=n_given)

    def extend(self, tokens: Tokens, written: Sequence[int]) -> Tokens:
        """Return the Tokens of a text and of the ids written after it; their `n_given` counts the text's tokens."""
        # Decode all ids at once: a character may be split between the last given token and the first written one.
        given_ids = tokens.ids.tolist()
        n_given = len(given_ids)
        ids = [*given_ids, *written]
        decoded, spans = self._decode(ids)
        given_decoded, _ = self._decode(given_ids)
        text = tokens.text
        offsets = None
        if decoded.startswith(given_decoded):
            text += decoded[len(given_decoded) :]
            if spans is not None and tokens.words is not None:
                # The given text may be longer or shorter than what its tokens decode to. Written tokens come after it.
                shift = len(tokens.text) - len(given_decoded)
                offsets = list(map(tuple, tokens.offsets.tolist()))
                offsets += [(start + shift, end + shift) for start, end in spans[n_given:]]
        special = [*tokens.special.tolist(), *self._special(written)]
        return replace(self._build(text, ids, offsets, special), n_given=n_given)

    def _build(
        self, text: str, ids: Sequence[int], spans: Spans | None, special: Sequence[bool]
    ) -> Tokens:
        """Return Tokens with the pieces of the ids, written in the tokenizer's style."""
        return build_tokens(
            text, ids=ids, pieces=self._pieces(ids), offsets=spans, special=special, style=self._style
        )

    def _decode(self, ids: Sequence[int]) -> tuple[str, Spans | None]:
        """Return the text of token ids, and the span of each in it; None where spans cannot be told."""
        text = ""
        spans: Spans = []
        for piece in self._pieces(ids):
            if text:
                text += " "
            spans.append((len(text), len(text) + len(piece)))
            text += piece
        return text, spans

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary writes each token."""
        return [f"#{token_id}" for token_id in ids]

    def _special(self, ids: Sequence[int]) -> list[bool]:
        """Return whether each token is special: it stands for no text."""
        return [False] * len(ids)


class HuggingFaceTokenizer(_IdTokenizer):
    """A tokenizer of transformers that returns Tokens: whole texts, never cut and never padded.

    Attributes:
        write_chat: Writes messages, which have `role` and `content`, by the chat template; None without one.
    """

    write_chat: Callable[..., str] | None = None

    def __init__(self, backend: Any) -> None:
        self.name = f"{type(backend).__name__}, {len(backend):,} pieces"
        self.backend = backend
        self.mask_id = getattr(backend, "mask_token_id", None)
        self.unknown_id = getattr(backend, "unk_token_id", None)
        self.prefix_ids = list(getattr(backend, "prefix_tokens", None) or ())
        if getattr(backend, "chat_template", None):
            self.encode_chat = self._encode_chat
            self.write_chat = self._write_chat
        # How pieces are written: a fast tokenizer says so by its parts, a slow one by its attributes.
        inner = getattr(backend, "backend_tokenizer", None) or getattr(backend, "_tokenizer", None)
        if inner is not None:
            self._style = detect_piece_style(inner)
        elif hasattr(backend, "byte_decoder"):
            self._style = "bytes"
        elif hasattr(backend, "sp_model"):
            self._style = "sentencepiece"
        if not backend.is_fast:
            self.note = (
                "The tokenizer has no fast version: it does not say where tokens stand in the text."
            )

    def ordinary_ids(self) -> list[int]:
        """Return the ids of all tokens that stand for text, ascending: neither special tokens nor unused ones."""
        vocabulary = self.backend.get_vocab().items()
        ids = {token_id for piece, token_id in vocabulary if "unused" not in piece}
        return sorted(ids - {*self.backend.all_special_ids})

    def spell(self, token_id: int) -> str:
        """Return the text of the token with this id; "<5>" where the vocabulary lacks it."""
        return f"<{token_id}>" if self._piece(token_id) is None else str(self.backend.decode([token_id]))

    def encode(self, text: str, pair: str | None = None, *, is_whole: bool = False) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects.

        Args:
            text: The text.
            pair: The second text of a pair.
            is_whole: Whether the text writes its special tokens itself, as a chat template does: none are added.
        """
        is_fast = self.backend.is_fast
        options = {
            "add_special_tokens": not is_whole,
            "verbose": False,
            "return_offsets_mapping": is_fast,
        }
        if not is_fast and pair is not None:
            raise AttnscopeError(
                "this model's tokenizer has no fast version, and reads no pairs", "leave out --pair"
            )
        require_tokenizable(text, pair)
        with as_failure("the tokenizer cannot read this text", "give another text"):
            encoded = self.backend(text, pair, **options)
        if is_fast:
            encoding = encoded.encodings[0]
            special = self._special(encoding.ids) if is_whole else None
            return tokens_of_encoding(encoding, text, pair, self._style, special)
        ids = list(encoded["input_ids"])
        return self._build(text, ids, self._spans_in(text, ids), self._special(ids))

    def _encode_chat(self, text: str) -> Tokens:
        """Tokenise a text as the user's message, up to where the model's answer begins."""
        message = {"role": "user", "content": text}
        return self.encode(self._write_chat([message], add_generation_prompt=True), is_whole=True)

    def _write_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        with as_failure("the chat template fails", "leave out --chat"):
            return str(self.backend.apply_chat_template(messages, tokenize=False, **options))

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return the tokens that the decoder reads as it writes `text`: the start token, then those of the text.

        Args:
            text: The text that the decoder is to write.
            start: The id of the start token.
            ends: The ids that end a text. The decoder writes one of them last, and never reads it: it is left out.
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
        # Leave out a start token and an end token that the tokenizer added: Whisper's adds both, some add neither.
        first = 1 if ids[:1] == [start] else 0
        end = len(ids)
        if end > first and (ids[-1] in ends or special[-1]):
            end -= 1
        return self._build(
            text, [start, *ids[first:end]], [(0, 0), *spans[first:end]], [True, *special[first:end]]
        )

    def _decode(self, ids: Sequence[int]) -> tuple[str, Spans | None]:
        """Return the text of token ids, and the span of each: the characters that it adds to the text before it.

        A token that ends within a character adds nothing; the one that completes the character adds it whole. An id
        that the tokenizer lacks, as models may have more, adds nothing. Spans are None where a token changes the text
        before it.
        """
        in_vocabulary = [self._piece(token_id) is not None for token_id in ids]

        def decode_first(n: int) -> str:
            known = list(itertools.compress(ids[:n], in_vocabulary))
            return str(
                self.backend.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )

        text = decode_first(len(ids))
        # Token n starts where the text of the first n tokens ends. U+FFFD at the end is half a character.
        beginnings = [decode_first(n).rstrip("\ufffd") for n in range(len(ids) + 1)]
        if not all(map(text.startswith, beginnings)):
            return text, None
        return text, list(itertools.pairwise(map(len, beginnings)))

    def _spans_in(self, text: str, ids: Sequence[int]) -> Spans | None:
        """Return the spans of tokens in a text if they decode to it, as those of bytes (ByT5) do; else None."""
        decoded, spans = self._decode(ids)
        return spans if decoded.startswith(text) else None

    def _pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._piece(token_id) or "" for token_id in ids]

    def _piece(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it; None where the vocabulary lacks the id."""
        try:
            piece = self.backend.convert_ids_to_tokens(int(token_id))
        except (IndexError, KeyError, OverflowError):
            return None
        return None if piece is None else str(piece)

    def _special(self, ids: Sequence[int]) -> list[bool]:
        added = self.backend.added_tokens_decoder.items()
        special = {token_id for token_id, token in added if token.special}
        special.update(self.backend.all_special_ids)
        # The unknown token stands for text.
        special.discard(self.unknown_id)
        return [token_id in special for token_id in ids]


class NumbersTokenizer(_IdTokenizer):
    """The tokenizer of a model that comes without one: its texts are token ids, such as "17 5 9"."""

    name = "none"
    note = "There is no tokenizer: texts are given as token numbers."

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Read token ids, separated by spaces or commas; refuse anything else."""
        numbers = text.replace(",", " ").split()
        if pair is not None or not numbers or not all(number.isdecimal() for number in numbers):
            raise AttnscopeError(
                "this model has no tokenizer", "give token numbers instead of a text, such as: 17 5 9"
            )
        return self.encode_ids(list(map(int, numbers)))

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return the start token, then the ids of the text; a last id that ends a text is left out."""
        ids = self.encode(text).ids.tolist()
        if ids[-1] in ends:
            ids.pop()
        return self.encode_ids([start, *ids])


class WordlessTokenizer(NumbersTokenizer):
    """The tokenizer of a model that reads no text: it refuses every text with one message.

    Args:
        message: What the model reads instead.
        hint: How that is given.
    """

    name = "none: it reads no text"
    note = ""

    def __init__(self, message: str, hint: str) -> None:
        self._message = message
        self._hint = hint

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Refuse a text."""
        raise AttnscopeError(self._message, self._hint)
