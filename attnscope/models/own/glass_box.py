"""The glass box: attnscope's own transformer with weights made by hand, so that what every head does is known.

Two layers of `core.attention.multihead.MultiHeadAttention` on a residual stream, without norms or feed-forward layers;
any text runs. `own` is an encoder whose layer 0 looks both ways and whose layer 1 looks back only. In `own-causal`, a
decoder, both look back. What follows holds for both.

**Residual stream.** Disjoint slots: place (98 numbers), token (64), five flags (one, rest, punctuation, bos, eos), and
64 for each head that it alone writes. A head finds slots by its query and key projections, takes the token codes of the
keys as values, and writes the mean code of what it attended to into its own slot. Nothing is overwritten.

**Places** (`place_codes`) are remainders, one-hot, for the pairwise coprime moduli 31, 33 and 34. Places i and j agree
in a(i, j) of these n = 3 remainders. Below 31 * 33 * 34 = 34,782 tokens only i = j agrees in all (Chinese remainder
theorem), so a <= n - 1 elsewhere. The code of place i + o is that of i with each block turned by o: a permutation
matrix, so that one projection looks o tokens ahead, exactly, from any place.

**Tokens** (`token_codes`): each number has 64 signs, a codeword of the Reed-Muller code RM(2, 6), which has 2**22. Two
of them differ in at least 2**(6-2) = 16 signs, so the dot product t of two codes is 64 for equal tokens and at most 32
for any others, without exception. Special tokens have code 0. Two words share a number with probability 1 / 3,080,184;
for everything that tells tokens apart by number they are then one token.

**[REST]**, the token after the first, is where a head rests that finds nothing, as trained heads rest on [CLS] or a
first token. It is a token of its own so that resting shows as nothing else: it is neither the first token nor a
delimiter. Its place stands in its flag, not in the place slot, so that a head that only rests there sees no place.

**Scores**, in units of `sharpness` (nats), but for what is the same for all keys of a query:

    offset o      2 a(i + o, j)                                     right 2n, others <= 2n - 2
    first         2 a(0, j)                                         the same
    same token    4n t(x_i, x_j) / 64 - 2 a(i, j) - (2n + 1);       [REST] 0
                  right: 4n - 2a - 2n - 1 >= 1 as a <= n - 1;       the token itself: -1;  others: <= 2n - 2n - 1 = -1
    induction     as same token, with x_(j-1) for x_j: what the previous-token head of layer 0 wrote at j
    delimiter     1 for punctuation, -1 for others;                 [REST] 0
    diffuse       0

From where an offset leads out of the text ([BOS] has no previous token, [EOS] no next), the query's flag adds 2n + 2 to
[REST]. So a right key is at least one unit above [REST] and two above all others, and where there is none, [REST] is
one above all others: with sharpness s and N tokens the right keys together get at least 1 / (1 + e^-s + N e^-2s) of the
mass, and [REST] at least 1 / (1 + N e^-s). With s = 16 both exceed 0.996 up to N = 34,782. Offsets are two units clear,
so that what a previous-token head writes is exact to N e^-2s < 1e-9.

Several right keys share the mass by e^(-2 s a): equally, but those whose distance is a multiple of 31, 33 or 34 are
passed over while there are others. (Codes that agree equally little everywhere would need one number for each place.)

Source: ours. Induction circuit: Elhage et al. 2021; Olsson et al. 2022. Reed-Muller codes: MacWilliams and Sloane 1977,
chapter 13.
"""

import hashlib
import math
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import combinations
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from attnscope.models.info import ModelInfo
from attnscope.models.model import Batch, Tokenizer
from attnscope.models.own.layered import LayeredModel
from attnscope.results.tokens import Tokens
from attnscope.text import build_tokens, is_punctuation, word_spans

if TYPE_CHECKING:
    from torch import Tensor

    from attnscope.core.attention.seam import Probe

Array = NDArray[np.float32]

# The numbers of tokens: special ones, then punctuation marks by their code points, then hashes of words.
BOS, REST, SEP, EOS = range(4)
SPECIAL = ("[BOS]", "[REST]", "[SEP]", "[EOS]")
FIRST_PUNCTUATION = 8
FIRST_WORD = FIRST_PUNCTUATION + sys.maxunicode + 1
CODE_BITS = 22
VOCABULARY = 1 << CODE_BITS

MODULI = (31, 33, 34)
MAX_TOKENS = math.prod(MODULI)
SHARPNESS = 16.0
"""How far in nats a right key scores above [REST], and [REST] above all others."""

D_CODE = 64
D_PLACE = sum(MODULI)
N_LAYERS = 2
N_HEADS = 7
D_HEAD = 168
D_MODEL = N_HEADS * D_HEAD

# The slots of the residual stream.
PLACE = slice(0, D_PLACE)
TOKEN = slice(D_PLACE, D_PLACE + D_CODE)
ONE, REST_FLAG, PUNCTUATION_FLAG, BOS_FLAG, EOS_FLAG = range(TOKEN.stop, TOKEN.stop + 5)
_FIRST_WRITTEN = EOS_FLAG + 1


def written_slot(layer: int, head: int) -> slice:
    """Return where in the residual stream a head writes the mean code of the tokens that it attended to."""
    start = _FIRST_WRITTEN + (layer * N_HEADS + head) * D_CODE
    return slice(start, start + D_CODE)


# Heads ----------------------------------------------------------------------------------------------------------

Terms = list[tuple[Array, Array]]
"""The terms of a head's scores, each the product of rows of its query and of its key projection, (row, d_model)."""


@dataclass(frozen=True)
class Head:
    """One head: what it attends to, its roles, and the function that makes the terms of its scores."""

    attends_to: str
    # The role that it is made for, then those that follow from it
    roles: tuple[str, ...]
    # Returns the terms in units of sharpness
    terms: Callable[[], Terms]


def _rows(slot: slice | int) -> Array:
    """Return rows that read a slot or a flag of the residual stream, number by number, (row, d_model)."""
    columns = np.arange(D_MODEL)
    rows: Array = (columns[slot].reshape(-1, 1) == columns).astype(np.float32)
    return rows


def _offset(offset: int, rest_flag: int | None = None) -> Terms:
    """Return the terms of a head that looks `offset` tokens ahead; queries with the flag `rest_flag` rest instead."""
    # 2 a(i + o, j): the place slot, but for [REST], whose place 1 stands in its flag.
    place = _rows(PLACE) + place_codes(np.array(1))[:, None] * _rows(REST_FLAG)
    terms = [(2 * _turn(offset) @ place, place)]
    if rest_flag is not None:
        terms.append(((2 * len(MODULI) + 2) * _rows(rest_flag), _rows(REST_FLAG)))
    return terms


def _first() -> Terms:
    """Return the term 2 a(0, j) of a head that looks at the first token."""
    return [(2 * place_codes(np.array(0))[:, None] * _rows(ONE), _rows(PLACE))]


def _match(codes: slice) -> Terms:
    """Return the terms of a head that looks for keys with the query's token in a slot, but not at the query itself."""
    # The three terms of "same token": matching codes, minus own place, minus a constant that [REST] gets back.
    n = len(MODULI)
    minus_place = _rows(PLACE)
    minus_place[:, PLACE] *= -2
    return [
        (4 * n / D_CODE * _rows(TOKEN), _rows(codes)),
        (minus_place, _rows(PLACE)),
        (_rows(ONE), (2 * n + 1) * (_rows(REST_FLAG) - _rows(ONE))),
    ]


def _punctuation() -> Terms:
    """Return the term of a head that looks at punctuation: 1 there, 0 at [REST], -1 elsewhere."""
    return [(_rows(ONE), _rows(REST_FLAG) - _rows(ONE) + 2 * _rows(PUNCTUATION_FLAG))]


def _turn(offset: int) -> Array:
    """Return the permutation that turns the code of place i into that of place i + offset, (98, 98)."""
    # The block of each modulus is turned by itself.
    permutation = np.zeros((D_PLACE, D_PLACE), np.float32)
    start = 0
    for modulus in MODULI:
        block = slice(start, start + modulus)
        permutation[block, block] = np.roll(np.eye(modulus), offset, axis=0)
        start = block.stop
    return permutation


_HEADS: dict[str, Head] = {
    "previous": Head("the previous token", ("previous_token", "local"), partial(_offset, -1, BOS_FLAG)),
    "writer": Head(
        "the previous token, whose code it writes for the induction head to find",
        ("previous_token", "local"),
        partial(_offset, -1, BOS_FLAG),
    ),
    "next": Head("the next token", ("next_token", "local"), partial(_offset, 1, EOS_FLAG)),
    "two back": Head("the token two back", ("local",), partial(_offset, -2, REST_FLAG)),
    "self": Head("the token itself", ("self_token", "local"), partial(_offset, 0)),
    "first": Head("the first token", ("first_token",), _first),
    "same": Head("the same token elsewhere in the text", ("same_token",), partial(_match, TOKEN)),
    "same earlier": Head("the same token earlier in the text", ("same_token",), partial(_match, TOKEN)),
    "induction": Head(
        "induction: the token that followed the query's token earlier, found by what L0H0 wrote",
        ("induction",),
        partial(_match, written_slot(0, 0)),
    ),
    "delimiter": Head("punctuation", ("delimiter",), _punctuation),
    "diffuse": Head("all tokens alike", ("diffuse",), list),
}
_LAYER_1 = ("previous", "induction", "self", "first", "same earlier", "two back", "diffuse")


@dataclass(frozen=True)
class Variant:
    """One glass box."""

    kind: Literal["encoder", "decoder"]
    # For each layer, whether queries attend to themselves and earlier tokens only
    looks_back: tuple[bool, ...]
    # The names of each layer's heads
    heads: tuple[tuple[str, ...], ...]
    # What its users must know
    note: str


VARIANTS: dict[str, Variant] = {
    "own": Variant(
        "encoder",
        (False, True),
        (("writer", "next", "self", "first", "same", "delimiter", "diffuse"), _LAYER_1),
        "Weights are made by hand; layer 0 looks both ways, layer 1 looks back only.",
    ),
    "own-causal": Variant(
        "decoder",
        (True, True),
        (("writer", "two back", "self", "first", "same earlier", "delimiter", "diffuse"), _LAYER_1),
        "Weights are made by hand; both layers look back only.",
    ),
}


def roles(name: str = "own") -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the roles of every head, by (layer, head): the role that it is made for, then those that follow from it.

    Heads that attend to the token itself or to the same token elsewhere also attend to similar tokens; this role is not
    listed.
    """
    return {number: head.roles for number, head in _heads_by_number(name).items()}


def _heads_by_number(name: str) -> dict[tuple[int, int], Head]:
    """Return the heads of a glass box, by (layer, head)."""
    names = VARIANTS[name].heads
    return {(layer, head): _HEADS[names[layer][head]] for layer, head in np.ndindex(N_LAYERS, N_HEADS)}


# Codes ----------------------------------------------------------------------------------------------------------


def place_codes(places: NDArray[np.int64]) -> Array:
    """Return the codes of places in a text, (…, 98), 0 or 1.

    Codes of places nearer than 34,782 to each other share at most 2 of their 3 ones. Negative places count backwards.
    """
    # One block per modulus, with a 1 at the remainder: (…, modulus).
    blocks = [np.eye(modulus, dtype=np.float32)[np.remainder(places, modulus)] for modulus in MODULI]
    return np.concatenate(blocks, axis=-1)


def token_codes(ids: NDArray[np.int64]) -> Array:
    """Return the codes of tokens, (…, 64): codewords of RM(2, 6) as signs, or 0 for special tokens.

    Dot products of different codes are at most 32.
    """
    # (…,) -> (…, 22) bits -> (…, 64) signs.
    bits = ((ids[..., None] >> np.arange(CODE_BITS)) & 1).astype(np.float32)
    codes: Array = 1 - 2 * ((bits @ _reed_muller()) % 2)
    codes[ids < FIRST_PUNCTUATION] = 0
    return codes


@cache
def _reed_muller() -> Array:
    """Return the generator matrix of RM(2, 6), (22, 64): products of at most two of six variables, at the 64 points."""
    variables = (np.arange(64) >> np.arange(6)[:, None]) & 1  # (6, 64)
    # The constant, the six variables, and their products in pairs.
    products = [first * second for first, second in combinations(variables, 2)]
    return np.array([np.ones(64, np.int64), *variables, *products], np.float32)


# Weights --------------------------------------------------------------------------------------------------------


def own_weights(name: str = "own") -> dict[str, Array]:
    """Return every weight, (d_model, d_model) each, by names such as "layers.0.q_proj"."""
    weights: dict[str, Array] = {}
    for layer, names in enumerate(VARIANTS[name].heads):
        query, key, value, output = np.zeros((4, D_MODEL, D_MODEL), np.float32)
        for number, head in enumerate(names):
            # The head's rows of the projections: its terms one after the other, then 0.
            row = number * D_HEAD
            codes = slice(row, row + D_CODE)
            for query_rows, key_rows in _HEADS[head].terms():
                rows = slice(row, row + len(query_rows))
                query[rows] = query_rows
                key[rows] = key_rows
                row = rows.stop
            # Values are the keys' token codes; the output copies their mean into the head's own slot.
            value[codes, TOKEN] = np.eye(D_CODE)
            output[written_slot(layer, number), codes] = np.eye(D_CODE)
        # Attention divides scores by the root of the heads' width.
        query *= np.float32(SHARPNESS * math.sqrt(D_HEAD))
        parts = {"q_proj": query, "k_proj": key, "v_proj": value, "out_proj": output}
        weights |= {f"layers.{layer}.{part}": weight for part, weight in parts.items()}
    return weights


def _sha256(weights: dict[str, Array]) -> str:
    """Return the SHA-256 of names and weights as little-endian float32, in order."""
    digest = hashlib.sha256()
    for name, array in weights.items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array, "<f4").data)
    return digest.hexdigest()


# Tokenizer -------------------------------------------------------------------------------------------------------


class OwnTokenizer(Tokenizer):
    """Words and punctuation marks, each with a fixed number: [BOS] [REST] text [EOS], or … text [SEP] text [EOS].

    Words are those of `text.word_spans`. Case and Unicode composition make no difference to a token's number; its
    label is the text itself. A punctuation mark's number is 8 + its code point; a word's is a hash (BLAKE2b) into the
    rest of the 2**22 numbers.
    """

    name = "words and punctuation marks, hashed to 4,194,304 numbers"

    def ordinary_ids(self) -> list[int]:
        """Return the numbers of words, about one in a thousand: all would be millions."""
        return list(range(FIRST_WORD, VOCABULARY, 997))

    def spell(self, number: int) -> str:
        """Return "": a number is a hash, and its word is not known."""
        return ""

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        rows = [_special_row(BOS, 0), _special_row(REST, 0), *_split(text, 0)]
        if pair is not None:
            rows += [_special_row(SEP, 0), *_split(pair, 1)]
        rows.append(_special_row(EOS, 0 if pair is None else 1))
        ids, pieces, offsets, special, segments = zip(*rows, strict=True)
        return build_tokens(
            text,
            ids=ids,
            pieces=pieces,
            offsets=offsets,
            special=special,
            segments=segments,
            pair=pair,
            style="plain",
        )


_Row = tuple[int, str, tuple[int, int], bool, int]
"""A token: its number, its text, the start and end of it in the text, whether it is special, and its segment."""


def _special_row(number: int, segment: int) -> _Row:
    """Return a special token."""
    return number, SPECIAL[number], (0, 0), True, segment


def _split(text: str, segment: int) -> Iterator[_Row]:
    """Yield the words and punctuation marks of a text."""
    for start, end in word_spans(text):
        word = text[start:end]
        yield _number(word), word, (start, end), False, segment


@lru_cache(maxsize=2**16)
def _number(word: str) -> int:
    """Return the number of a word or a punctuation mark."""
    if len(word) == 1 and is_punctuation(word):
        return FIRST_PUNCTUATION + ord(word)
    # Case folding can undo composition, so words are composed before and after it.
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())
    # A 64-bit hash is so wide that its remainder favours no number.
    digest = hashlib.blake2b(plain.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return FIRST_WORD + int.from_bytes(digest, "little") % (VOCABULARY - FIRST_WORD)


# Model ----------------------------------------------------------------------------------------------------------


def own_info(
    name: str = "own",
    weights: dict[str, Array] | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
) -> ModelInfo:
    """Return the facts of a glass box, without loading torch."""
    variant = VARIANTS[name]
    weights = weights or own_weights(name)
    return ModelInfo(
        name=name,
        source="made by attnscope",
        sha256=_sha256(weights),
        architecture="own",
        kinds=(variant.kind,),
        n_layers=(N_LAYERS,),
        n_heads=(N_HEADS,),
        n_kv_heads=(N_HEADS,),
        d_model=D_MODEL,
        n_parameters=sum(array.size for array in weights.values()),
        max_tokens=MAX_TOKENS,
        dtype=dtype,
        device=device,
        notes=(variant.note,),
        heads=tuple(
            (f"L{layer}H{number}", head.attends_to)
            for (layer, number), head in _heads_by_number(name).items()
        ),
    )


class OwnModel(LayeredModel):
    """A loaded glass box as a Model: two attention layers on a residual stream, without norms."""

    sigma = D_MODEL**-0.5
    # For each layer, whether queries attend to themselves and earlier tokens only
    looks_back: tuple[bool, ...] = ()

    def run(self, batch: Batch, probe: "Probe") -> "Tensor":
        """Run a batch with the probe at each attention; padding may be on either side, and segments are ignored.

        Returns the final residual stream, (batch, token, d_model); `written_slot` says where a head has written.
        """
        batch = self._require(batch)
        hidden = self._embed(batch.ids, batch.mask)
        with self._forward_pass():
            for layer, looks_back in zip(self._layers, self.looks_back, strict=True):
                written, _ = layer(
                    hidden, key_padding_mask=batch.mask, is_causal=looks_back, probe=probe
                )
                hidden = hidden + written
        return hidden

    def static_embeddings(self, ids: "Tensor") -> "Tensor":
        """Return the codes of tokens: (…,) token numbers -> (…, 64)."""
        import torch

        return torch.from_numpy(token_codes(ids.cpu().numpy())).to(ids.device)

    def _embed(self, ids: "Tensor", mask: "Tensor | None") -> "Tensor":
        import torch

        # Places count real tokens only, so that padding on either side moves nothing: (batch, token).
        is_real = torch.ones_like(ids) if mask is None else mask
        places = (is_real.cumsum(1) - 1).clamp(min=0)
        is_rest = ids == REST
        precision: torch.dtype = getattr(torch, self.info.dtype)
        hidden = torch.zeros(*ids.shape, D_MODEL, dtype=precision, device=ids.device)
        # Fill the disjoint slots of (batch, token, d_model).
        hidden[..., PLACE] = torch.from_numpy(place_codes(places.cpu().numpy())).to(hidden)
        hidden[..., PLACE].masked_fill_(is_rest[..., None], 0)
        hidden[..., TOKEN] = self.static_embeddings(ids).to(hidden)
        hidden[..., ONE] = 1
        hidden[..., REST_FLAG] = is_rest
        hidden[..., PUNCTUATION_FLAG] = (ids >= FIRST_PUNCTUATION) & (ids < FIRST_WORD)
        hidden[..., BOS_FLAG] = ids == BOS
        hidden[..., EOS_FLAG] = ids == EOS
        return hidden


def load_own(
    name: str = "own",
    *,
    device: str = "cpu",
    dtype: str = "float32",
) -> OwnModel:
    """Load a glass box, "own" or "own-causal"; `models.load` explains device and precision."""
    variant = VARIANTS[name]
    weights = own_weights(name)

    import torch

    from attnscope.core.attention.multihead import MultiHeadAttention
    from attnscope.models.devices import choose_device

    # Layers are made on the meta device, and the weights put in: nothing is drawn at random first.
    target, precision = choose_device(device, dtype)
    info = own_info(name, weights, device=str(target), dtype=dtype)
    network = torch.nn.Module()
    with torch.device("meta"):
        network.layers = torch.nn.ModuleList(
            MultiHeadAttention(D_MODEL, N_HEADS, bias=False, layer=number, kind=variant.kind)
            for number in range(N_LAYERS)
        )
    state = {}
    for part, weight in weights.items():
        state[f"{part}.weight"] = torch.from_numpy(weight).to(target, precision)
    model = OwnModel(info, OwnTokenizer(), network, state, VOCABULARY)
    model.looks_back = variant.looks_back
    return model
