"""The shape of attnscope's own decoder, its files' names and its tokenizer: all that needs no torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import tokenizers
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers

from attnscope.errors import AttnscopeError
from attnscope.models.info import ModelInfo
from attnscope.models.own.layouts import OWN_DECODER, Shape
from attnscope.models.tokenizer import FastTokenizer
from attnscope.records import Tokens

Positions = Literal["rotary", "learned", "none"]

ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class DecoderConfig:
    """What config.json of a decoder holds beside its model type.

    `own_decoder` says what each of these is. Positions are "rotary" (queries and keys are turned by their places),
    "learned" (a vector for each place is added to the embedding) or "none".
    """

    vocab_size: int
    n_layers: int = 2
    n_heads: int = 4
    d_model: int = 64
    d_ff: int = 0
    positions: Positions = "rotary"
    norm: bool = True
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "n_layers", "n_heads", "d_model", "max_tokens", "d_ff"):
            value, least = getattr(self, name), int(name != "d_ff")  # there are decoders of attention alone
            if name == "max_tokens" and value is None:
                continue
            if type(value) is not int or value < least:
                raise AttnscopeError(f"{name} is {value!r}, but must be at least {least}", "give another number")
        if self.d_model % self.n_heads:
            raise AttnscopeError(
                f"d_model {self.d_model} is no multiple of the {self.n_heads} heads", "give numbers that divide"
            )
        if self.positions not in get_args(Positions):
            raise AttnscopeError(
                f"there are no positions {self.positions!r}", f"choose from {', '.join(get_args(Positions))}"
            )
        if self.positions == "rotary" and (self.d_model // self.n_heads) % 2:
            raise AttnscopeError(
                f"rotary positions turn pairs of columns, and a head has {self.d_model // self.n_heads}",
                "give heads of an even width, or positions='learned'",
            )
        if self.positions == "learned" and self.max_tokens is None:
            raise AttnscopeError("learned positions need max_tokens, the longest text", "such as max_tokens=256")

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> "DecoderConfig":
        """What a config.json says; refused where it lacks a size, or what it says makes no sense."""
        missing = [field.name for field in fields(cls) if field.name not in config]
        if missing:
            raise AttnscopeError(f"the config.json of {name} does not say {missing[0]}", "get the file again")
        try:
            return cls(**{field.name: config[field.name] for field in fields(cls)})
        except AttnscopeError as error:
            raise AttnscopeError(f"the config.json of {name} makes no sense: {error.message}", error.hint) from error

    def as_json(self) -> dict[str, Any]:
        """What config.json holds."""
        return {"model_type": OWN_DECODER, **asdict(self)}

    def tensors(self) -> dict[str, tuple[str, Shape]]:
        """Every tensor: the module's name for it -> its name in the file, which is the same, and its shape."""
        width, inner = self.d_model, self.d_ff
        shapes: dict[str, Shape] = {"embed.weight": (self.vocab_size, width)}
        if self.positions == "learned":
            shapes["position.weight"] = (self.max_tokens or 0, width)

        def norm(name: str) -> None:
            shapes.update({f"{name}.weight": (width,), f"{name}.bias": (width,)} if self.norm else {})

        for number in range(self.n_layers):
            layer = f"layers.{number}"
            norm(f"{layer}.attention_norm")
            shapes |= {f"{layer}.attention.{part}_proj.weight": (width, width) for part in ("q", "k", "v", "out")}
            if inner:
                norm(f"{layer}.norm")
                shapes |= {f"{layer}.up.weight": (inner, width), f"{layer}.up.bias": (inner,)}
                shapes |= {f"{layer}.down.weight": (width, inner), f"{layer}.down.bias": (width,)}
        norm("norm")
        shapes["unembed.weight"] = (self.vocab_size, width)
        return {name: (name, shape) for name, shape in shapes.items()}

    def info(self, name: str, source: str, sha256: str, *, dtype: str = "float32", device: str = "cpu") -> ModelInfo:
        """What is known of a decoder of this shape."""
        return ModelInfo(
            name=name,
            source=source,
            sha256=sha256,
            architecture=OWN_DECODER,
            kinds=("decoder",),
            n_layers=(self.n_layers,),
            n_heads=(self.n_heads,),
            n_kv_heads=(self.n_heads,),
            d_model=self.d_model,
            n_parameters=sum(math.prod(shape) for _, shape in self.tensors().values()),
            max_tokens=self.max_tokens,
            dtype=dtype,
            device=device,
        )


class WordTokenizer(FastTokenizer):
    """Words apart by blanks, each a token of a small vocabulary; no special tokens."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend, f"words, {backend.get_vocab_size():,} of them")

    @classmethod
    def open(cls, folder: Path) -> "WordTokenizer":
        """Loads tokenizer.json of a folder; see FastTokenizer."""
        return cls(FastTokenizer.open(folder).backend)

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenises a text; refuses a word that is not of the vocabulary by its name."""
        try:
            return super().encode(text, pair)
        except AttnscopeError as error:
            words = " ".join((text, pair or "")).split()
            strange = next((word for word in words if self.backend.token_to_id(word) is None), None)
            if strange is None:
                raise
            n_words = self.backend.get_vocab_size()
            some = ", ".join(str(self.backend.id_to_token(number)) for number in range(min(n_words, 5)))
            raise AttnscopeError(
                f"{strange[:40]!r} is none of the {n_words:,} words that this model knows",
                f"its words, with blanks between: {some}{', …' if n_words > 5 else ''}",
            ) from error


def word_tokenizer(words: Sequence[str]) -> WordTokenizer:
    """The tokenizer of a vocabulary, whose words are not empty, have no blanks, and are there once."""
    for word in words:
        if not isinstance(word, str) or word.split() != [word]:
            raise AttnscopeError(f"{word!r} is no word: words stand apart by blanks", "give words without blanks")
    if len(set(words)) < len(words) or not words:
        twice = next((word for word in words if list(words).count(word) > 1), "")
        raise AttnscopeError(f"{twice!r} is twice in the vocabulary" if words else "the vocabulary is empty")
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = tokenizers.Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="[no such word]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return WordTokenizer(backend)
