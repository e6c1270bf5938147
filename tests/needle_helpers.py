"""A decoder whose heads are made by hand: one looks at the token before, one finds what followed, and copies it."""

import torch
from torch import Tensor

import attnscope
from attnscope.models.model import Model
from attnscope.questions.heads import Heads
from examples.decoder import Decoder, decoder, wrap

WORDS, PLACES = 20, 120
PREVIOUS = (0, 1)
RETRIEVAL = (1, 0)
OFFSET = (1, 1)
"""Layer and head."""
_SHARP = 300.0


def planted_decoder(n_heads: int = 2, *, writes: bool = True, offset: int = 0) -> Decoder:
    """Two layers, no norms; the stream has the token, the token before, the answer, and the place, one-hot each.

    Args:
        n_heads: Of each layer; only two of all do anything.
        writes: Whether the model writes what the head copies.
        offset: So many tokens back another head looks, which writes nothing; 0 = there is none.
    """
    token, before, answer = (slice(part * WORDS, (part + 1) * WORDS) for part in range(3))
    place = slice(3 * WORDS, 3 * WORDS + PLACES)
    width = n_heads * PLACES
    network = decoder(
        WORDS,
        n_layers=2,
        n_heads=n_heads,
        d_model=width,
        positions="learned",
        norm=False,
        max_tokens=PLACES,
    )
    with torch.no_grad():
        for weight in network.parameters():
            weight.zero_()
        network.embed.weight[:, token] = torch.eye(WORDS)
        network.position.weight[:, place] = torch.eye(PLACES)
        earlier = torch.eye(PLACES).roll(-1, 1)  # place n looks for n - 1
        earlier[0] = 0
        _plant(network, PREVIOUS, (place, earlier.mT), (place, torch.eye(PLACES)), (token, before))
        eye = torch.eye(WORDS)
        _plant(network, RETRIEVAL, (token, eye), (before, eye), (token, answer))
        if offset:
            back = torch.eye(PLACES).roll(-offset, 1)
            back[:offset] = 0
            _plant(network, OFFSET, (place, back.mT), (place, torch.eye(PLACES)), (token, answer))
            network.layers[1].attention.out_proj.weight[:, PLACES:] = 0
        if writes:
            network.unembed.weight[:, answer] = eye
    return network


def _plant(
    network: Decoder,
    at: tuple[int, int],
    query: tuple[slice, Tensor],
    key: tuple[slice, Tensor],
    moved: tuple[slice, slice],
) -> None:
    attention = network.layers[at[0]].attention
    first = at[1] * PLACES
    for weight, (part, matrix), size in (
        (attention.q_proj.weight, query, _SHARP),
        (attention.k_proj.weight, key, 1.0),
    ):
        weight[first : first + len(matrix), part] = size * matrix
    source, target = moved
    attention.v_proj.weight[first : first + WORDS, source] = torch.eye(WORDS)
    attention.out_proj.weight[target, first : first + WORDS] = torch.eye(WORDS)


def planted_model(n_heads: int = 2, *, writes: bool = True) -> Model:
    """The same as a loaded model."""
    return wrap(planted_decoder(n_heads, writes=writes))


def planted_findings() -> Heads:
    """What is found of it, and without its head."""
    options = attnscope.NeedleOptions(lengths=(48, 96), n=15)
    return attnscope.retrieval_heads(planted_model(), options=options)
