"""Turn texts into Tokens by a Hugging Face tokenizer: plain texts, chat messages, targets, and token ids alone.

A *target* is the text that the decoder of an encoder-decoder writes. A *piece* is the string of a token in the
vocabulary, such as "##ing". The module does not import transformers: its caller passes a tokenizer object.
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
    """Make Tokens from token ids. This base class has no vocabulary: it writes the token with id 5 as "#5".

    Attributes:
        note: What a user must know about the tokenizer; may be empty.
        prefix_ids: The ids that the tokenizer puts before a transcript, with the start token first. Empty unless it is
            the tokenizer of a speech model.
    """

    note = ""
    prefix_ids: Sequence[int] = ()
    _style: PieceStyle = "plain"

    def encode_ids(
        self, ids: Sequence[int], picture_labels: Mapping[int, str] = {}, n_given: int = -1
    ) -> Tokens:
        """Return the Tokens of token ids. Their text is the decoded ids.

        Args:
            ids: The ids.
            picture_labels: Position of an id that stands for a part of a picture -> its label. It decodes to no text.
            n_given: The number of ids of the prompt. The model wrote the ids after them. -1 = it wrote no ids.
        """
        # Decode each range of ids between two picture tokens. Its spans start from 0, so shift them by the text before.
        text = ""
        spans: Spans | None = [(0, 0)] * len(ids)
        for picture_position, next_picture_position in itertools.pairwise(
            [-1, *sorted(picture_labels), len(ids)]
        ):
            id_range = slice(picture_position + 1, next_picture_position)
            run_text, run_spans = self._decode(ids[id_range])
            if run_spans is None or spans is None:
                spans = None
            else:
                run_start = len(text)
                spans[id_range] = [(run_start + start, run_start + end) for start, end in run_spans]
            text += run_text
        special = self._mark_special(ids)
        for position in picture_labels:
            special[position] = True
        tokens = self._build(text, ids, spans, special)
        labels = tuple(picture_labels.get(i, label) for i, label in enumerate(tokens.labels))
        return replace(tokens, labels=labels, n_given=n_given)

    def extend(self, tokens: Tokens, written_ids: Sequence[int]) -> Tokens:
        """Return the Tokens of a prompt and of the ids written after it. `n_given` is the prompt's number of tokens."""
        # Decode all ids together: the last token of the prompt and the first written token may share a character.
        given_ids = tokens.ids.tolist()
        n_given = len(given_ids)
        ids = [*given_ids, *written_ids]
        decoded, spans = self._decode(ids)
        given_decoded, _ = self._decode(given_ids)
        text = tokens.text
        offsets = None
        if decoded.startswith(given_decoded):
            text += decoded[len(given_decoded) :]
            if spans is not None and tokens.words is not None:
                # The prompt and its decoded tokens may differ in length, for example by special tokens.
                shift = len(tokens.text) - len(given_decoded)
                offsets = list(map(tuple, tokens.offsets.tolist()))
                offsets += [(start + shift, end + shift) for start, end in spans[n_given:]]
        special = [*tokens.special.tolist(), *self._mark_special(written_ids)]
        return replace(self._build(text, ids, offsets, special), n_given=n_given)

    def _build(
        self, text: str, ids: Sequence[int], spans: Spans | None, special: Sequence[bool]
    ) -> Tokens:
        """Return the Tokens of a text. `spans` and `special` have one entry per id; None = spans are not known."""
        return build_tokens(
            text,
            ids=ids,
            pieces=self._list_pieces(ids),
            offsets=spans,
            special=special,
            style=self._style,
        )

    def _decode(self, ids: Sequence[int]) -> tuple[str, Spans | None]:
        """Return the text of token ids, and the span of each token in that text; None if the spans are not known."""
        text = ""
        spans: Spans = []
        for piece in self._list_pieces(ids):
            if text:
                text += " "
            spans.append((len(text), len(text) + len(piece)))
            text += piece
        return text, spans

    def _list_pieces(self, ids: Sequence[int]) -> list[str]:
        """Return the piece of each token: its string in the vocabulary."""
        return [f"#{token_id}" for token_id in ids]

    def _mark_special(self, ids: Sequence[int]) -> list[bool]:
        """Return whether each token is special, such as [CLS]: a special token stands for no text."""
        return [False] * len(ids)


class HuggingFaceTokenizer(_IdTokenizer):
    """Tokenise texts by a transformers tokenizer. Texts are never truncated and never padded.

    Attributes:
        write_chat: Renders messages, mappings with `role` and `content`, by the chat template; None without a template.
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
        # Find out how pieces mark spaces and bytes: a fast tokenizer by its parts, a slow one by its attributes.
        fast_tokenizer = getattr(backend, "backend_tokenizer", None) or getattr(
            backend, "_tokenizer", None
        )
        if fast_tokenizer is not None:
            self._style = detect_piece_style(fast_tokenizer)
        elif hasattr(backend, "byte_decoder"):
            self._style = "bytes"
        elif hasattr(backend, "sp_model"):
            self._style = "sentencepiece"
        if not backend.is_fast:
            self.note = (
                "The tokenizer has no fast version: it does not say where tokens stand in the text."
            )

    def ordinary_ids(self) -> list[int]:
        """Return the ids of all tokens that stand for text, ascending, without special and unused tokens."""
        ids = {token_id for piece, token_id in self.backend.get_vocab().items() if "unused" not in piece}
        return sorted(ids - {*self.backend.all_special_ids})

    def spell(self, token_id: int) -> str:
        """Return the text of the token with this id, or "<5>" if the vocabulary has no id 5."""
        return (
            f"<{token_id}>"
            if self._find_piece(token_id) is None
            else str(self.backend.decode([token_id]))
        )

    def encode(self, text: str, pair: str | None = None, *, is_whole: bool = False) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects.

        Args:
            text: The text.
            pair: The second text of a pair.
            is_whole: Whether the text already contains its special tokens, as the output of a chat template does. Then
                no special tokens are added.
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
            special = self._mark_special(encoding.ids) if is_whole else None
            return tokens_of_encoding(encoding, text, pair, self._style, special)
        ids = list(encoded["input_ids"])
        return self._build(text, ids, self._find_spans(text, ids), self._mark_special(ids))

    def _encode_chat(self, text: str) -> Tokens:
        """Tokenise a text as the user's message in a chat, up to the start of the model's answer."""
        message = {"role": "user", "content": text}
        return self.encode(self._write_chat([message], add_generation_prompt=True), is_whole=True)

    def _write_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        with as_failure("the chat template fails", "leave out --chat"):
            return str(self.backend.apply_chat_template(messages, tokenize=False, **options))

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return the tokens that the decoder reads as it writes `text`: the start token, then the tokens of the text.

        Args:
            text: The text that the decoder writes.
            start: The id of the start token.
            ends: The ids of end tokens. The decoder writes an end token last, and never reads it. So it is left out.
        """
        # Tokenise as `text_target`: Marian and M2M have other special tokens for targets.
        require_tokenizable(text)
        is_fast = self.backend.is_fast
        with as_failure("the tokenizer cannot read the target"):
            encoding = self.backend(text_target=text, return_offsets_mapping=is_fast)
        ids = list(encoding["input_ids"])
        special = self._mark_special(ids)
        spans = encoding["offset_mapping"] if is_fast else self._find_spans(text, ids)
        if spans is None:
            spans = [(0, 0)] * len(ids)
        # Drop a start token and an end token that the tokenizer added. Whisper's adds both, some add neither.
        first = 1 if ids[:1] == [start] else 0
        end = len(ids)
        if end > first and (ids[-1] in ends or special[-1]):
            end -= 1
        return self._build(
            text, [start, *ids[first:end]], [(0, 0), *spans[first:end]], [True, *special[first:end]]
        )

    def _decode(self, ids: Sequence[int]) -> tuple[str, Spans | None]:
        """Return the text of token ids, and the span of each token: the characters that it adds to the text before it.

        A token that ends within a character adds nothing. The token that completes the character adds all of it. A
        model may have more ids than its tokenizer; an id without a token adds nothing. The spans are None if a token
        changes the text before it.
        """
        in_vocabulary = [self._find_piece(token_id) is not None for token_id in ids]

        def decode_prefix(n: int) -> str:
            known = list(itertools.compress(ids[:n], in_vocabulary))
            return str(
                self.backend.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )

        text = decode_prefix(len(ids))
        # Token n starts at the end of the text of the first n tokens. U+FFFD at the end is an incomplete character.
        prefix_texts = [decode_prefix(n).rstrip("\ufffd") for n in range(len(ids) + 1)]
        if not all(map(text.startswith, prefix_texts)):
            return text, None
        return text, list(itertools.pairwise(map(len, prefix_texts)))

    def _find_spans(self, text: str, ids: Sequence[int]) -> Spans | None:
        """Return the spans of tokens in a text if the ids decode to that text, as in ByT5; else None."""
        decoded, spans = self._decode(ids)
        return spans if decoded.startswith(text) else None

    def _list_pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._find_piece(token_id) or "" for token_id in ids]

    def _find_piece(self, token_id: int) -> str | None:
        """Return the piece of a token; None if the vocabulary does not have the id."""
        try:
            piece = self.backend.convert_ids_to_tokens(int(token_id))
        except (IndexError, KeyError, OverflowError):
            return None
        return None if piece is None else str(piece)

    def _mark_special(self, ids: Sequence[int]) -> list[bool]:
        added = self.backend.added_tokens_decoder.items()
        special = {token_id for token_id, token in added if token.special}
        special.update(self.backend.all_special_ids)
        # transformers counts the unknown token as special, but it stands for text.
        special.discard(self.unknown_id)
        return [token_id in special for token_id in ids]


class NumbersTokenizer(_IdTokenizer):
    """Tokenise for a model without a tokenizer: its texts are token ids, such as "17 5 9"."""

    name = "none"
    note = "There is no tokenizer: texts are given as token numbers."

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Read token ids, separated by spaces or commas. Raise AttnscopeError for any other text."""
        numbers = text.replace(",", " ").split()
        if pair is not None or not numbers or not all(number.isdecimal() for number in numbers):
            raise AttnscopeError(
                "this model has no tokenizer", "give token numbers instead of a text, such as: 17 5 9"
            )
        return self.encode_ids(list(map(int, numbers)))

    def encode_target(self, text: str, start: int, ends: Collection[int]) -> Tokens:
        """Return the start token, then the ids of the text. If the last id is an end token, it is left out."""
        ids = self.encode(text).ids.tolist()
        if ids[-1] in ends:
            ids.pop()
        return self.encode_ids([start, *ids])


class WordlessTokenizer(NumbersTokenizer):
    """Refuse every text, for a model that reads no text.

    Args:
        message: The error's message, which says what the model reads instead.
        hint: The error's hint, which says how to pass that input.
    """

    name = "none: it reads no text"
    note = ""

    def __init__(self, message: str, hint: str) -> None:
        self._message = message
        self._hint = hint

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Raise AttnscopeError."""
        raise AttnscopeError(self._message, self._hint)
