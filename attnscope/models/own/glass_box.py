"""The glass box: attnscope's own transformer with weights made by hand, so that what every head does is known.

It has two layers of `core.attention.multihead.MultiHeadAttention` on a residual stream, without norms or feed-forward
layers, and reads any text. There are two variants. `own` is an encoder whose layer 0 is bidirectional and whose layer 1
is causal. `own-causal` is a decoder, causal in both layers. All that follows holds for both.

**Residual stream.** Its columns are divided into disjoint slots: the token's position (98 columns), its code (64), five
flags of one column each (constant 1, is [REST], is punctuation, is [BOS], is [EOS]), and for each head 64 columns that
only this head writes. W_Q and W_K of a head read slots. W_V reads the codes of the keys' tokens. W_O writes their mean,
weighted by the head's attention, into the head's slot. Nothing is overwritten.

**Position codes** (`position_codes`) are the remainders of position i modulo 31, 33 and 34, each one-hot. The moduli
are pairwise coprime. Let n = 3, and let a(i, j) be the number of these n remainders in which positions i and j agree.
In texts of up to 31 * 33 * 34 = 34,782 tokens, a = n only if i = j (Chinese remainder theorem), and else a <= n - 1.
The code of i + o is the code of i with each one-hot block rotated by o. A rotation is a permutation matrix, so one
projection looks exactly o tokens ahead from any position.

**Token codes** (`token_codes`) are 64 signs per id: a codeword of the Reed-Muller code RM(2, 6), which has 2**22
codewords. Two codewords differ in at least 2**(6-2) = 16 signs. So the dot product t of two codes is 64 for equal ids,
and at most 32 for different ids. Special tokens have code 0. Ids of words are hashes: two words have equal ids with
probability 1 / 3,080,184, and the heads cannot tell such words apart.

**[REST]**, the second token, is the attention sink. It gets the attention of a head that finds no matching key, as
[CLS] or a first token does in trained models. It is neither the first token nor a delimiter, so that a head that
attends to it resembles no other role. Its position slot is 0, so that such a head copies no position; its flag replaces
the slot.

**Scores**, in units of `SHARPNESS` (nats), up to a constant per query. A *right* key is one that the head's role names,
such as the previous token:

    offset o      2 a(i + o, j)                                     right 2n, others <= 2n - 2
    first         2 a(0, j)                                         the same
    same token    4n t(x_i, x_j) / 64 - 2 a(i, j) - (2n + 1);       [REST] 0
                  right (t = 64, a <= n - 1):                       >= 4n - 2(n - 1) - (2n + 1) = 1
                  the token itself (t = 64, a = n):                 4n - 2n - (2n + 1) = -1
                  others (t <= 32, a >= 0):                         <= 2n - 0 - (2n + 1) = -1
    induction     as same token, with x_(j-1) instead of x_j: what the previous-token head of layer 0 wrote at j
    delimiter     1 for punctuation, -1 for others;                 [REST] 0
    diffuse       0

If an offset leads out of the text ([BOS] has no previous token, [EOS] no next), the query's flag adds 2n + 2 to the
score of [REST]. So a right key is at least one unit above [REST], and two above all other keys. If there is no right
key, [REST] is one unit above all other keys. With sharpness s and N tokens, the right keys together get at least
1 / (1 + e^-s + N e^-2s) of the attention; without right keys, [REST] gets at least 1 / (1 + N e^-s). With s = 16, both
exceed 0.996 up to N = 34,782. In a head with an offset, the right key is two units above [REST] too. All other keys
together get less than N e^-2s < 1e-9 of the attention, so the code that a previous-token head writes is exact to 1e-9.

A "same token" or induction head may find several right keys. Each gets attention in proportion to e^(-2 s a), where
a = a(i, j). Normally a = 0, so right keys get equal shares. The exception: a > 0 if the distance from the query to the
key is a multiple of 31, 33 or 34. That key gets almost nothing if there are right keys with a = 0. (Position codes
without this exception would need one column per position.)

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
SPECIAL_TOKENS = ("[BOS]", "[REST]", "[SEP]", "[EOS]")
FIRST_PUNCTUATION = 8
FIRST_WORD = FIRST_PUNCTUATION + sys.maxunicode + 1
CODE_BITS = 22
VOCAB_SIZE = 1 << CODE_BITS

MODULI = (31, 33, 34)
MAX_TOKENS = math.prod(MODULI)
SHARPNESS = 16.0
"""The margin, in nats, of a right key's score over [REST], and of [REST] over all other keys."""

D_CODE = 64
D_POSITION = sum(MODULI)
N_LAYERS = 2
N_HEADS = 7
# The largest number of rows that the terms of a score need, 64 + 98 + 1, rounded up to a multiple of 8.
D_HEAD = 168
D_MODEL = N_HEADS * D_HEAD

# The slots of the residual stream, as columns of d_model.
POSITION_SLOT = slice(0, D_POSITION)
TOKEN_SLOT = slice(D_POSITION, D_POSITION + D_CODE)
ONE_FLAG, REST_FLAG, PUNCTUATION_FLAG, BOS_FLAG, EOS_FLAG = range(TOKEN_SLOT.stop, TOKEN_SLOT.stop + 5)


def written_slot(layer: int, head: int) -> slice:
    """Return the slot of the residual stream that a head writes, as columns.

    The head writes the mean code of all tokens there, weighted by its attention.
    """
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
    # The role that the head is designed for, then roles that follow from it
    roles: tuple[str, ...]
    # Returns the terms of the head's scores, in units of SHARPNESS
    make_terms: Callable[[], Terms]


def _select(slot: slice | int) -> Array:
    """Return rows of W_Q or W_K that copy a slot (or flag) of the residual stream, (row, d_model), 0 or 1.

    Row i reads column i of the slot.
    """
    columns = np.arange(D_MODEL)
    rows: Array = (columns[slot].reshape(-1, 1) == columns).astype(np.float32)
    return rows


def _offset_terms(offset: int, rest_flag: int | None = None) -> Terms:
    """Return the terms of a head that looks `offset` tokens ahead; queries with the flag `rest_flag` look at [REST]."""
    # 2 a(i + o, j). [REST] is at position 1, but its position slot is 0. So its flag is mapped to the code of 1.
    rest_position = np.outer(position_codes(1), _select(REST_FLAG))
    position = _select(POSITION_SLOT) + rest_position
    terms = [(2 * _shift(offset) @ position, position)]
    if rest_flag is not None:
        terms.append(((2 * len(MODULI) + 2) * _select(rest_flag), _select(REST_FLAG)))
    return terms


def _first_terms() -> Terms:
    """Return the term 2 a(0, j) of a head that looks at the first token."""
    # Every query asks for the code of position 0. That is a constant, so W_Q reads the flag that is always 1.
    return [(2 * np.outer(position_codes(0), _select(ONE_FLAG)), _select(POSITION_SLOT))]


def _match_terms(codes: slice) -> Terms:
    """Return the terms of a head that looks for keys whose slot `codes` holds the query's token, except the query.

    `codes` is the slot of the keys' tokens ("same token"), or the slot that the head L0H0 writes ("induction").
    """
    # "Same token" has three terms: matching codes, minus agreement of positions, minus a constant except at [REST].
    n = len(MODULI)
    minus_position = _select(POSITION_SLOT)
    # Multiply only these columns: elsewhere -2 * 0 = -0.0 would change the hash of the weights.
    minus_position[:, POSITION_SLOT] *= -2
    return [
        (4 * n / D_CODE * _select(TOKEN_SLOT), _select(codes)),
        (minus_position, _select(POSITION_SLOT)),
        (_select(ONE_FLAG), (2 * n + 1) * (_select(REST_FLAG) - _select(ONE_FLAG))),
    ]


def _punctuation_terms() -> Terms:
    """Return the term of a head that looks at punctuation: 1 there, 0 at [REST], -1 elsewhere."""
    return [(_select(ONE_FLAG), _select(REST_FLAG) - _select(ONE_FLAG) + 2 * _select(PUNCTUATION_FLAG))]


def _shift(offset: int) -> Array:
    """Return the permutation matrix that maps the code of position i to that of i + offset, (98, 98)."""
    # Each modulus has a one-hot block in the code, which is rotated on its own.
    permutation = np.zeros((D_POSITION, D_POSITION), np.float32)
    start = 0
    for modulus in MODULI:
        block = slice(start, start + modulus)
        permutation[block, block] = np.roll(np.eye(modulus), offset, axis=0)
        start = block.stop
    return permutation


_HEAD_DESIGNS: dict[str, HeadDesign] = {
    "previous": HeadDesign(
        "the previous token", ("previous_token", "local"), partial(_offset_terms, -1, BOS_FLAG)
    ),
    "writer": HeadDesign(
        "the previous token, whose code it writes for the induction head to find",
        ("previous_token", "local"),
        partial(_offset_terms, -1, BOS_FLAG),
    ),
    "next": HeadDesign("the next token", ("next_token", "local"), partial(_offset_terms, 1, EOS_FLAG)),
    # [BOS] has no token two back either. But the layers with this head are causal, and there [BOS] sees only itself.
    "two back": HeadDesign("the token two back", ("local",), partial(_offset_terms, -2, REST_FLAG)),
    "self": HeadDesign("the token itself", ("self_token", "local"), partial(_offset_terms, 0)),
    "first": HeadDesign("the first token", ("first_token",), _first_terms),
    "same": HeadDesign(
        "the same token elsewhere in the text", ("same_token",), partial(_match_terms, TOKEN_SLOT)
    ),
    "same earlier": HeadDesign(
        "the same token earlier in the text", ("same_token",), partial(_match_terms, TOKEN_SLOT)
    ),
    "induction": HeadDesign(
        "induction: the token that followed the query's token earlier, found by what L0H0 wrote",
        ("induction",),
        partial(_match_terms, written_slot(0, 0)),
    ),
    "delimiter": HeadDesign("punctuation", ("delimiter",), _punctuation_terms),
    # `list` returns [], no terms: all scores are 0.
    "diffuse": HeadDesign("all tokens alike", ("diffuse",), list),
}
# The heads of layer 1 of both variants, in order
_LAYER_1_HEADS = ("previous", "induction", "self", "first", "same earlier", "two back", "diffuse")


@dataclass(frozen=True)
class GlassBoxDesign:
    """Describe a variant of the glass box."""

    # Layer 0 of an encoder is bidirectional; every other layer is causal
    kind: Literal["encoder", "decoder"]
    # For each layer, the names of its heads in `_HEAD_DESIGNS`
    heads: tuple[tuple[str, ...], ...]
    # A sentence for users
    note: str


VARIANTS: dict[str, GlassBoxDesign] = {
    "own": GlassBoxDesign(
        "encoder",
        (("writer", "next", "self", "first", "same", "delimiter", "diffuse"), _LAYER_1_HEADS),
        "Weights are made by hand; layer 0 looks both ways, layer 1 looks back only.",
    ),
    "own-causal": GlassBoxDesign(
        "decoder",
        (
            ("writer", "two back", "self", "first", "same earlier", "delimiter", "diffuse"),
            _LAYER_1_HEADS,
        ),
        "Weights are made by hand; both layers look back only.",
    ),
}


def roles_by_head(name: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the roles of every head, by (layer, head): the role it is designed for, then roles that follow from it.

    Heads that attend to the token itself or to the same token elsewhere also attend to similar tokens; this role is not
    listed.
    """
    return {layer_head: design.roles for layer_head, design in _designs_by_head(name).items()}


def _designs_by_head(name: str) -> dict[tuple[int, int], HeadDesign]:
    """Return the designs of the heads of a variant, by (layer, head)."""
    names = VARIANTS[name].heads
    return {
        (layer, head): _HEAD_DESIGNS[names[layer][head]] for layer, head in np.ndindex(N_LAYERS, N_HEADS)
    }


# Codes ----------------------------------------------------------------------------------------------------------


def position_codes(positions: NDArray[np.int64] | int) -> Array:
    """Return the codes of positions in a text, (…) -> (…, 98), 0 or 1.

    Codes of two positions less than 34,782 apart share at most 2 of their 3 ones.
    """
    # Each modulus has a block, (…, modulus), with 1 at the remainder and 0 elsewhere.
    blocks = [np.eye(modulus, dtype=np.float32)[np.remainder(positions, modulus)] for modulus in MODULI]
    return np.concatenate(blocks, axis=-1)


def token_codes(ids: NDArray[np.int64]) -> Array:
    """Return the codes of tokens, (…) -> (…, 64): codewords of RM(2, 6) as signs 1 and -1, or 0 for special tokens.

    Dot products of different codes are at most 32.
    """
    # ids (…) -> bits (…, 22) -> codes (…, 64)
    bits = ((ids[..., None] >> np.arange(CODE_BITS)) & 1).astype(np.float32)
    codes: Array = 1 - 2 * ((bits @ _reed_muller()) % 2)
    codes[ids < FIRST_PUNCTUATION] = 0
    return codes


@cache
def _reed_muller() -> Array:
    """Return the generator matrix of RM(2, 6), (22, 64): the monomials of degree <= 2 of six bits, at all 64 points."""
    variables = (np.arange(64) >> np.arange(6)[:, None]) & 1  # (6, 64)
    # The monomials are the constant 1, the six variables, and the products of two variables.
    products = [first * second for first, second in combinations(variables, 2)]
    return np.array([np.ones(64, np.int64), *variables, *products], np.float32)


# Weights --------------------------------------------------------------------------------------------------------


def make_weights(name: str) -> dict[str, Array]:
    """Return every weight, (d_model, d_model) each, by names such as "layers.0.q_proj".

    Rows head * D_HEAD to (head + 1) * D_HEAD of W_Q, W_K and W_V belong to a head, and these columns of W_O.
    """
    weights: dict[str, Array] = {}
    for layer, names in enumerate(VARIANTS[name].heads):
        w_q, w_k, w_v, w_o = np.zeros((4, D_MODEL, D_MODEL), np.float32)
        for head, head_name in enumerate(names):
            # Stack the terms of the head in its rows of W_Q and W_K. Rows that are left over stay 0.
            row = head * D_HEAD
            value_rows = slice(row, row + D_CODE)
            for query_rows, key_rows in _HEAD_DESIGNS[head_name].make_terms():
                rows = slice(row, row + len(query_rows))
                w_q[rows] = query_rows
                w_k[rows] = key_rows
                row = rows.stop
            # The values of the head are the keys' token codes. W_O copies their weighted mean into the head's slot.
            w_v[value_rows, TOKEN_SLOT] = np.eye(D_CODE)
            w_o[written_slot(layer, head), value_rows] = np.eye(D_CODE)
        # Multiply by sqrt(d_head), because attention divides scores by it.
        w_q *= SHARPNESS * math.sqrt(D_HEAD)
        weights[f"layers.{layer}.q_proj"] = w_q
        weights[f"layers.{layer}.k_proj"] = w_k
        weights[f"layers.{layer}.v_proj"] = w_v
        weights[f"layers.{layer}.out_proj"] = w_o
    return weights


# Tokenizer -------------------------------------------------------------------------------------------------------

_TokenRow = tuple[int, str, tuple[int, int], bool, int]
"""A token: its id, its text, the (start, end) of that text, whether the token is special, and its segment (0 or 1)."""


class OwnTokenizer(Tokenizer):
    """Split texts into words and punctuation marks, each with a fixed id.

    A text becomes [BOS] [REST] text [EOS], and a pair [BOS] [REST] text [SEP] text [EOS]. `text.word_spans` finds the
    words. Case and Unicode composition make no difference to the id of a token; its label is the text itself. The id of
    a punctuation mark is 8 + its code point. The id of a word is a hash (BLAKE2b) into the rest of the 2**22 ids.
    """

    name = "words and punctuation marks, hashed to 4,194,304 numbers"

    def ordinary_ids(self) -> list[int]:
        """Return a sample of the ids of words, every 997th of the three million."""
        return list(range(FIRST_WORD, VOCAB_SIZE, 997))

    def spell(self, token_id: int) -> str:
        """Return "": an id is a hash, from which the word cannot be recovered."""
        return ""

    def encode(self, text: str, pair: str | None = None) -> Tokens:
        """Tokenise a text, or a pair of texts, with the special tokens that the model expects."""
        rows = [_special_row(BOS, 0), _special_row(REST, 0), *_split(text, 0)]
        if pair is not None:
            rows += [_special_row(SEP, 0), *_split(pair, 1)]
        rows.append(_special_row(EOS, 0 if pair is None else 1))
        # One tuple per field of `_TokenRow`.
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


def _special_row(token_id: int, segment: int) -> _TokenRow:
    """Return a special token. Its span in the text is empty, (0, 0)."""
    return token_id, SPECIAL_TOKENS[token_id], (0, 0), True, segment


def _split(text: str, segment: int) -> Iterator[_TokenRow]:
    """Yield the words and punctuation marks of a text."""
    for start, end in word_spans(text):
        word = text[start:end]
        yield _word_id(word), word, (start, end), False, segment


def _word_id(word: str) -> int:
    """Return the id of a word or a punctuation mark."""
    if len(word) == 1 and is_punctuation(word):
        return FIRST_PUNCTUATION + ord(word)
    # Case folding can undo composition, so compose the word before and after folding.
    normalized = unicodedata.normalize("NFC", unicodedata.normalize("NFC", word).casefold())
    # The remainder of a 64-bit number is practically uniform over the ids.
    digest = hashlib.blake2b(normalized.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return FIRST_WORD + int.from_bytes(digest, "little") % (VOCAB_SIZE - FIRST_WORD)


# Model ----------------------------------------------------------------------------------------------------------


def describe_own(
    name: str = "own",
    weights: dict[str, Array] | None = None,
    *,
    device: str = "cpu",
    dtype: str = "float32",
) -> ModelInfo:
    """Return the facts of a variant, without loading torch. `weights` spares computing its weights for the hash."""
    variant = VARIANTS[name]
    weights = weights or make_weights(name)
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
            (f"L{layer}H{head}", design.attends_to)
            for (layer, head), design in _designs_by_head(name).items()
        ),
    )


class OwnModel(LayeredModel):
    """A loaded glass box as a Model: two attention layers on a residual stream, without norms."""

    # The standard deviation of untrained weights. With it, a linear map keeps the scale of its input
    weight_std = D_MODEL**-0.5

    def run(self, batch: Batch, probe: "Probe") -> "Tensor":
        """Run a batch, and return the final residual stream, (batch, token, d_model).

        Each layer calls `probe` with its queries, keys and values; the probe returns the outputs of the heads, and may
        record or change the attention. Padding may be on either side; segments are ignored. `written_slot` gives the
        columns of the residual stream with a head's output.
        """
        batch = self._prepare(batch)
        hidden = self._embed(batch.ids, batch.mask)
        with self._forward_pass():
            for index, layer in enumerate(self._blocks):
                # Only layer 0 of an encoder is bidirectional.
                is_causal = index > 0 or self.info.kinds == ("decoder",)
                attended, _ = layer(
                    hidden, key_padding_mask=batch.mask, is_causal=is_causal, probe=probe
                )
                hidden = hidden + attended
        return hidden

    def static_embeddings(self, ids: "Tensor") -> "Tensor":
        """Return the codes of tokens: ids, (…) -> (…, 64)."""
        import torch

        return torch.from_numpy(token_codes(ids.cpu().numpy())).to(ids.device)

    def _embed(self, ids: "Tensor", mask: "Tensor | None") -> "Tensor":
        """Return the residual stream before layer 0: (batch, token) -> (batch, token, d_model)."""
        import torch

        # Number only real tokens, so that padding on the left shifts no position: (batch, token).
        is_real = torch.ones_like(ids) if mask is None else mask
        positions = (is_real.cumsum(1) - 1).clamp(min=0)
        is_rest = ids == REST
        precision: torch.dtype = getattr(torch, self.info.dtype)
        hidden = torch.zeros(*ids.shape, D_MODEL, dtype=precision, device=ids.device)
        # Fill the slots. The position slot of [REST] is 0.
        hidden[..., POSITION_SLOT] = torch.from_numpy(position_codes(positions.cpu().numpy())).to(hidden)
        hidden[..., POSITION_SLOT].masked_fill_(is_rest[..., None], 0)
        hidden[..., TOKEN_SLOT] = self.static_embeddings(ids).to(hidden)
        hidden[..., ONE_FLAG] = 1
        hidden[..., REST_FLAG] = is_rest
        hidden[..., PUNCTUATION_FLAG] = (ids >= FIRST_PUNCTUATION) & (ids < FIRST_WORD)
        hidden[..., BOS_FLAG] = ids == BOS
        hidden[..., EOS_FLAG] = ids == EOS
        return hidden


def load_own(name: str, *, device: str = "cpu", dtype: str = "float32") -> OwnModel:
    """Load a variant of the glass box, "own" or "own-causal"; `models.load` explains device and dtype."""
    variant = VARIANTS[name]
    weights = make_weights(name)

    import torch

    from attnscope.core.attention.multihead import MultiHeadAttention
    from attnscope.models.devices import choose_device

    target, precision = choose_device(device, dtype)
    info = describe_own(name, weights, device=str(target), dtype=dtype)
    network = torch.nn.Module()
    # On the meta device, layers are made without weights. Otherwise, random weights would be drawn, and then replaced.
    with torch.device("meta"):
        network.layers = torch.nn.ModuleList(
            MultiHeadAttention(D_MODEL, N_HEADS, bias=False, layer=layer, kind=variant.kind)
            for layer in range(N_LAYERS)
        )
    state = {}
    for weight_name, weight in weights.items():
        state[f"{weight_name}.weight"] = torch.from_numpy(weight).to(target, precision)
    return OwnModel(info, OwnTokenizer(), network, state, VOCAB_SIZE)
