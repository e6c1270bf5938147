"""The glass box: attnscope's own transformer with weights made by hand, so that what every head does is known.

Two layers of `core.attention.multihead.MultiHeadAttention` on a residual stream, without norms or feed-forward layers.
It reads any text. `own` is an encoder whose layer 0 is bidirectional and whose layer 1 is causal. `own-causal`, a
decoder, is causal in both layers. What follows holds for both.

**Residual stream.** It is cut into disjoint slots: the token's position (98 columns), its code (64), five flags of one
column each (constant 1, is [REST], is punctuation, is [BOS], is [EOS]), and for each head 64 columns that it alone
writes. W_Q and W_K of a head read slots. W_V reads the codes of the keys' tokens, and W_O writes their mean under the
head's weights into the head's own slot. Nothing is overwritten.

**Positions** have codes (`position_codes`): the remainders of i modulo 31, 33 and 34, which are pairwise coprime, each
one-hot. Positions i and j agree in a(i, j) of these n = 3 remainders. Below 31 * 33 * 34 = 34,782 tokens only i = j
agrees in all (Chinese remainder theorem), so a <= n - 1 elsewhere. The code of i + o is that of i with each block
rotated by o. That is a permutation matrix, so one projection looks exactly o tokens ahead from any position.

**Tokens** have codes (`token_codes`): the code of an id is 64 signs, a codeword of the Reed-Muller code RM(2, 6), which
has 2**22. Two codewords differ in at least 2**(6-2) = 16 signs, so the dot product t of two codes is 64 for equal ids
and at most 32 for any others. Special tokens have code 0. Ids of words are hashes: two words share one with probability
1 / 3,080,184, and the heads cannot tell such words apart.

**[REST]**, the second token, gets the weight of a head that finds no key, as [CLS] or a first token does in trained
models. It is a token of its own, neither the first token nor a delimiter, so that this resting resembles no other role.
Its flag stands for its position too: its position slot is 0, so that a head resting there copies no position.

**Scores**, in units of `SHARPNESS` (nats), up to a constant per query. A right key is one that the head's role names:

    offset o      2 a(i + o, j)                                     right 2n, others <= 2n - 2
    first         2 a(0, j)                                         the same
    same token    4n t(x_i, x_j) / 64 - 2 a(i, j) - (2n + 1);       [REST] 0
                  right: 4n - 2a - 2n - 1 >= 1 as a <= n - 1;       the token itself: -1;  others: <= 2n - 2n - 1 = -1
    induction     as same token, with x_(j-1) for x_j: what the previous-token head of layer 0 wrote at j
    delimiter     1 for punctuation, -1 for others;                 [REST] 0
    diffuse       0

Where an offset leads out of the text ([BOS] has no previous token, [EOS] no next), the query's flag adds 2n + 2 to
[REST]. So a right key is at least one unit above [REST] and two above all others, and where there is none, [REST] is
one above all others. With sharpness s and N tokens the right keys together get at least 1 / (1 + e^-s + N e^-2s) of the
mass; without any, [REST] gets at least 1 / (1 + N e^-s). With s = 16 both exceed 0.996 up to N = 34,782. Offsets are
two units clear, so that what a previous-token head writes is exact to N e^-2s < 1e-9.

Several right keys share the mass in proportion to e^(-2 s a). So they share it equally, except that keys at a distance
of a multiple of 31, 33 or 34 from the query get next to nothing while there are others. (Codes that agree equally
little everywhere would need one column per position.)

Source: ours. Induction circuit: Elhage et al. 2021; Olsson et al. 2022. Reed-Muller codes: MacWilliams and Sloane 1977,
chapter 13.
"""

import hashlib
import math
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
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

# Token ids: special tokens, then punctuation marks (8 + code point), then hashes of words. 4 to 7 are unused.
BOS, REST, SEP, EOS = range(4)
SPECIAL = ("[BOS]", "[REST]", "[SEP]", "[EOS]")
FIRST_PUNCTUATION = 8
FIRST_WORD = FIRST_PUNCTUATION + sys.maxunicode + 1
CODE_BITS = 22
VOCABULARY = 1 << CODE_BITS

MODULI = (31, 33, 34)
MAX_TOKENS = math.prod(MODULI)
SHARPNESS = 16.0
"""How far in nats a key that a head looks for scores above [REST], and [REST] above all others."""

D_CODE = 64
D_POSITION = sum(MODULI)
N_LAYERS = 2
N_HEADS = 7
# Room for the largest terms of a score, 64 + 98 + 1 rows, rounded up to a multiple of 8.
D_HEAD = 168
D_MODEL = N_HEADS * D_HEAD

# The slots of the residual stream, as columns of d_model.
POSITION = slice(0, D_POSITION)
TOKEN = slice(D_POSITION, D_POSITION + D_CODE)
ONE, REST_FLAG, PUNCTUATION_FLAG, BOS_FLAG, EOS_FLAG = range(TOKEN.stop, TOKEN.stop + 5)


def written_slot(layer: int, head: int) -> slice:
    """Return the slot of the residual stream that a head writes: the mean code of the tokens that it attended to."""
    start = EOS_FLAG + 1 + (layer * N_HEADS + head) * D_CODE
    return slice(start, start + D_CODE)


# Heads ----------------------------------------------------------------------------------------------------------

Terms = list[tuple[Array, Array]]
"""Pairs (rows of W_Q, rows of W_K), each (row, d_model), of one head.

With x_i the residual stream at query i and x_j at key j, the score is the sum over pairs of (Q x_i) · (K x_j).
"""


@dataclass(frozen=True)
class HeadDesign:
    """Describe a head: what it attends to, its roles, and the function that makes the terms of its scores."""

    attends_to: str
    # The role that it is made for, then those that follow from it
    roles: tuple[str, ...]
    # Returns the terms in units of SHARPNESS
    terms: Callable[[], Terms]


def _read(slot: slice | int) -> Array:
    """Return rows of a projection that copy a slot (or flag) of the residual stream: row i reads its i-th column.

    (row, d_model), 0 or 1.
    """
    columns = np.arange(D_MODEL)
    rows: Array = (columns[slot].reshape(-1, 1) == columns).astype(np.float32)
    return rows


def _offset_terms(offset: int, rest_flag: int | None = None) -> Terms:
    """Return the terms of a head that looks `offset` tokens ahead; queries with the flag `rest_flag` rest instead."""
    # 2 a(i + o, j). [REST] stands at position 1, but its position slot is 0: its flag gives the code of 1 instead.
    rest_position = np.outer(position_codes(1), _read(REST_FLAG))
    position = _read(POSITION) + rest_position
    terms = [(2 * _shift(offset) @ position, position)]
    if rest_flag is not None:
        terms.append(((2 * len(MODULI) + 2) * _read(rest_flag), _read(REST_FLAG)))
    return terms


def _first_terms() -> Terms:
    """Return the term 2 a(0, j) of a head that looks at the first token."""
    # Every query asks for the code of position 0: a constant, so it reads the flag that is always 1.
    return [(2 * np.outer(position_codes(0), _read(ONE)), _read(POSITION))]


def _match_terms(codes: slice) -> Terms:
    """Return the terms of a head that looks for keys whose slot `codes` holds the query's token, except the query."""
    # The three terms of "same token": matching codes, minus own position, minus a constant that [REST] gets back.
    n = len(MODULI)
    minus_position = _read(POSITION)
    # Only these columns: -2 * 0 elsewhere would be -0.0, and change the hash of the weights.
    minus_position[:, POSITION] *= -2
    return [
        (4 * n / D_CODE * _read(TOKEN), _read(codes)),
        (minus_position, _read(POSITION)),
        (_read(ONE), (2 * n + 1) * (_read(REST_FLAG) - _read(ONE))),
    ]


def _punctuation_terms() -> Terms:
    """Return the term of a head that looks at punctuation: 1 there, 0 at [REST], -1 elsewhere."""
    return [(_read(ONE), _read(REST_FLAG) - _read(ONE) + 2 * _read(PUNCTUATION_FLAG))]


def _shift(offset: int) -> Array:
    """Return the permutation matrix that maps the code of position i to that of i + offset, (98, 98)."""
    # The block of each modulus is rotated by itself.
    permutation = np.zeros((D_POSITION, D_POSITION), np.float32)
    start = 0
    for modulus in MODULI:
        block = slice(start, start + modulus)
        permutation[block, block] = np.roll(np.eye(modulus), offset, axis=0)
        start = block.stop
    return permutation


_HEADS: dict[str, HeadDesign] = {
    "previous": HeadDesign(
        "the previous token", ("previous_token", "local"), partial(_offset_terms, -1, BOS_FLAG)
    ),
    "writer": HeadDesign(
        "the previous token, whose code it writes for the induction head to find",
        ("previous_token", "local"),
        partial(_offset_terms, -1, BOS_FLAG),
    ),
    "next": HeadDesign("the next token", ("next_token", "local"), partial(_offset_terms, 1, EOS_FLAG)),
    "two back": HeadDesign("the token two back", ("local",), partial(_offset_terms, -2, REST_FLAG)),
    "self": HeadDesign("the token itself", ("self_token", "local"), partial(_offset_terms, 0)),
    "first": HeadDesign("the first token", ("first_token",), _first_terms),
    "same": HeadDesign(
        "the same token elsewhere in the text", ("same_token",), partial(_match_terms, TOKEN)
    ),
    "same earlier": HeadDesign(
        "the same token earlier in the text", ("same_token",), partial(_match_terms, TOKEN)
    ),
    "induction": HeadDesign(
        "induction: the token that followed the query's token earlier, found by what L0H0 wrote",
        ("induction",),
        partial(_match_terms, written_slot(0, 0)),
    ),
    "delimiter": HeadDesign("punctuation", ("delimiter",), _punctuation_terms),
    # `list` returns no terms: all scores are 0.
    "diffuse": HeadDesign("all tokens alike", ("diffuse",), list),
}
_LAYER_1 = ("previous", "induction", "self", "first", "same earlier", "two back", "diffuse")


@dataclass(frozen=True)
class GlassBoxDesign:
    """Describe a glass box."""

    # An encoder's layer 0 is bidirectional; every other layer is causal
    kind: Literal["encoder", "decoder"]
    # The names of each layer's heads in `_HEADS`
    heads: tuple[tuple[str, ...], ...]
    # What its users must know
    note: str


VARIANTS: dict[str, GlassBoxDesign] = {
    "own": GlassBoxDesign(
        "encoder",
        (("writer", "next", "self", "first", "same", "delimiter", "diffuse"), _LAYER_1),
        "Weights are made by hand; layer 0 looks both ways, layer 1 looks back only.",
    ),
    "own-causal": GlassBoxDesign(
        "decoder",
        (("writer", "two back", "self", "first", "same earlier", "delimiter", "diffuse"), _LAYER_1),
        "Weights are made by hand; both layers look back only.",
    ),
}


def roles(name: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the roles of every head, by (layer, head): the role that it is made for, then those that follow from it.

    Heads that attend to the token itself or to the same token elsewhere also attend to similar tokens; this role is not
    listed.
    """
    return {index: head.roles for index, head in _heads_by_index(name).items()}


def _heads_by_index(name: str) -> dict[tuple[int, int], HeadDesign]:
    """Return the heads of a glass box, by (layer, head)."""
    names = VARIANTS[name].heads
    return {(layer, head): _HEADS[names[layer][head]] for layer, head in np.ndindex(N_LAYERS, N_HEADS)}


# Codes ----------------------------------------------------------------------------------------------------------


def position_codes(positions: NDArray[np.int64] | int) -> Array:
    """Return the codes of positions in a text, (…) -> (…, 98), 0 or 1.

    Codes of two positions less than 34,782 apart share at most 2 of their 3 ones.
    """
    # One block per modulus, with a 1 at the remainder: (…, modulus).
    blocks = [np.eye(modulus, dtype=np.float32)[np.remainder(positions, modulus)] for modulus in MODULI]
    return np.concatenate(blocks, axis=-1)


def token_codes(ids: NDArray[np.int64]) -> Array:
    """Return the codes of tokens, (…) -> (…, 64): codewords of RM(2, 6) as signs 1 and -1, or 0 for special tokens.

    Dot products of different codes are at most 32.
    """
    # (…) ids -> (…, 22) their bits -> (…, 64) signs.
    bits = ((ids[..., None] >> np.arange(CODE_BITS)) & 1).astype(np.float32)
    codes: Array = 1 - 2 * ((bits @ _reed_muller()) % 2)
    codes[ids < FIRST_PUNCTUATION] = 0
    return codes


@cache
def _reed_muller() -> Array:
    """Return the generator matrix of RM(2, 6), (22, 64): the monomials of degree <= 2 of six bits, at all 64 points."""
    variables = (np.arange(64) >> np.arange(6)[:, None]) & 1  # (6, 64)
    # The constant, the six variables, and their products in pairs.
    products = [first * second for first, second in combinations(variables, 2)]
    return np.array([np.ones(64, np.int64), *variables, *products], np.float32)


# Weights --------------------------------------------------------------------------------------------------------


def own_weights(name: str) -> dict[str, Array]:
    """Return every weight, (d_model, d_model) each, by names such as "layers.0.q_proj"."""
    weights: dict[str, Array] = {}
    for layer, names in enumerate(VARIANTS[name].heads):
        w_q, w_k, w_v, w_o = np.zeros((4, D_MODEL, D_MODEL), np.float32)
        for head, head_name in enumerate(names):
            # The head's D_HEAD rows of W_Q and W_K: its terms one below the other, then 0.
            row = head * D_HEAD
            codes = slice(row, row + D_CODE)
            for query_rows, key_rows in _HEADS[head_name].terms():
                rows = slice(row, row + len(query_rows))
                w_q[rows] = query_rows
                w_k[rows] = key_rows
                row = rows.stop
            # Its values are the keys' token codes; W_O copies their mean into the head's own slot.
            w_v[codes, TOKEN] = np.eye(D_CODE)
            w_o[written_slot(layer, head), codes] = np.eye(D_CODE)
        # Attention divides scores by sqrt(d_head).
        w_q *= SHARPNESS * math.sqrt(D_HEAD)
        weights[f"layers.{layer}.q_proj"] = w_q
        weights[f"layers.{layer}.k_proj"] = w_k
        weights[f"layers.{layer}.v_proj"] = w_v
        weights[f"layers.{layer}.out_proj"] = w_o
    return weights


# Tokenizer -------------------------------------------------------------------------------------------------------

_Row = tuple[int, str, tuple[int, int], bool, int]
"""A token: its id, its text, where that starts and ends, whether it is special, and its segment (0 or 1)."""


class OwnTokenizer(Tokenizer):
    """Words and punctuation marks, each with a fixed id: [BOS] [REST] text [EOS], or … text [SEP] text [EOS].

    Words are those of `text.word_spans`. Case and Unicode composition make no difference to a token's id; its label is
    the text itself. A punctuation mark's id is 8 + its code point; a word's is a hash (BLAKE2b) into the rest of the
    2**22 ids.
    """

    name = "words and punctuation marks, hashed to 4,194,304 numbers"

    def ordinary_ids(self) -> list[int]:
        """Return a sample of the ids of words, every 997th: all of them would be three million."""
        return list(range(FIRST_WORD, VOCABULARY, 997))

    def spell(self, number: int) -> str:
        """Return "": an id is a hash, from which the word cannot be told."""
        return ""

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        rows = [_special_row(BOS, 0), _special_row(REST, 0), *_split(text, 0)]
        if pair is not None:
            rows += [_special_row(SEP, 0), *_split(pair, 1)]
        rows.append(_special_row(EOS, 0 if pair is None else 1))
        # One tuple per field of `_Row`.
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


def _special_row(token_id: int, segment: int) -> _Row:
    """Return a special token; its place in the text is empty."""
    return token_id, SPECIAL[token_id], (0, 0), True, segment


def _split(text: str, segment: int) -> Iterator[_Row]:
    """Yield the words and punctuation marks of a text."""
    for start, end in word_spans(text):
        word = text[start:end]
        yield _word_id(word), word, (start, end), False, segment


def _word_id(word: str) -> int:
    """Return the id of a word or a punctuation mark."""
    if len(word) == 1 and is_punctuation(word):
        return FIRST_PUNCTUATION + ord(word)
    # Case folding can undo composition, so words are composed before and after it.
    plain = unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())
    # 64 bits are so many that the remainder is as good as uniform.
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
    # Hash the names and the weights as little-endian float32, in order.
    digest = hashlib.sha256()
    for weight_name, weight in weights.items():
        digest.update(weight_name.encode())
        digest.update(np.ascontiguousarray(weight, "<f4").data)
    return ModelInfo(
        name=name,
        source="made by attnscope",
        sha256=digest.hexdigest(),
        architecture="own",
        kinds=(variant.kind,),
        n_layers=(N_LAYERS,),
        n_heads=(N_HEADS,),
        n_kv_heads=(N_HEADS,),
        d_model=D_MODEL,
        n_parameters=sum(weight.size for weight in weights.values()),
        max_tokens=MAX_TOKENS,
        dtype=dtype,
        device=device,
        notes=(variant.note,),
        heads=tuple(
            (f"L{layer}H{index}", head.attends_to)
            for (layer, index), head in _heads_by_index(name).items()
        ),
    )


class OwnModel(LayeredModel):
    """A loaded glass box as a Model: two attention layers on a residual stream, without norms."""

    # The standard deviation of untrained weights, which keeps the scale of what they map
    sigma = D_MODEL**-0.5

    def run(self, batch: Batch, probe: "Probe") -> "Tensor":
        """Run a batch with the probe at each attention; padding may be on either side, and segments are ignored.

        Returns the final residual stream, (batch, token, d_model); `written_slot` says where a head has written.
        """
        batch = self._prepare(batch)
        hidden = self._embed(batch.ids, batch.mask)
        with self._forward_pass():
            for index, layer in enumerate(self._layers):
                # Only layer 0 of an encoder is bidirectional.
                is_causal = index > 0 or self.info.kinds == ("decoder",)
                written, _ = layer(hidden, key_padding_mask=batch.mask, is_causal=is_causal, probe=probe)
                hidden = hidden + written
        return hidden

    def static_embeddings(self, ids: "Tensor") -> "Tensor":
        """Return the codes of tokens: (…) ids -> (…, 64)."""
        import torch

        return torch.from_numpy(token_codes(ids.cpu().numpy())).to(ids.device)

    def _embed(self, ids: "Tensor", mask: "Tensor | None") -> "Tensor":
        """Return the residual stream before layer 0: (batch, token) -> (batch, token, d_model)."""
        import torch

        # Positions count real tokens only, so that padding on either side moves nothing: (batch, token).
        is_real = torch.ones_like(ids) if mask is None else mask
        positions = (is_real.cumsum(1) - 1).clamp(min=0)
        is_rest = ids == REST
        precision: torch.dtype = getattr(torch, self.info.dtype)
        hidden = torch.zeros(*ids.shape, D_MODEL, dtype=precision, device=ids.device)
        # Fill the slots; [REST] has no position there.
        hidden[..., POSITION] = torch.from_numpy(position_codes(positions.cpu().numpy())).to(hidden)
        hidden[..., POSITION].masked_fill_(is_rest[..., None], 0)
        hidden[..., TOKEN] = self.static_embeddings(ids).to(hidden)
        hidden[..., ONE] = 1
        hidden[..., REST_FLAG] = is_rest
        hidden[..., PUNCTUATION_FLAG] = (ids >= FIRST_PUNCTUATION) & (ids < FIRST_WORD)
        hidden[..., BOS_FLAG] = ids == BOS
        hidden[..., EOS_FLAG] = ids == EOS
        return hidden


def load_own(
    name: str,
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

    target, precision = choose_device(device, dtype)
    info = own_info(name, weights, device=str(target), dtype=dtype)
    network = torch.nn.Module()
    # Layers on the meta device have no weights yet, so that none are drawn at random only to be replaced.
    with torch.device("meta"):
        network.layers = torch.nn.ModuleList(
            MultiHeadAttention(D_MODEL, N_HEADS, bias=False, layer=layer, kind=variant.kind)
            for layer in range(N_LAYERS)
        )
    state = {}
    for weight_name, weight in weights.items():
        state[f"{weight_name}.weight"] = torch.from_numpy(weight).to(target, precision)
    return OwnModel(info, OwnTokenizer(), network, state, VOCABULARY)
