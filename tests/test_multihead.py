import numpy as np
import pytest
import torch
from beartype import beartype
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch import nn

from attnscope.core.attention.multihead import MultiHeadAttention
from tests.core_helpers import EXACT, SIZES, WORKED, few_examples
from tests.oracle import Projection, multi_head

# d_model 15 = 3 heads of 5.
D_MODEL = 15
N_HEADS = 3
N_QUERIES = 13
N_KEYS = 9
BATCH = 2
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def chance(*shape, seed=0):
    """A mask that hides four in ten, but never a row's first key: torch's own module answers NaN to an empty row."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.4
    mask[..., 0] = True
    return mask


def torch_twin(dtype=torch.float64, bias=True, d_model=D_MODEL, n_heads=N_HEADS):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(d_model, n_heads, bias=bias, batch_first=True, dtype=torch.float64)
    # Fresh biases are all zero: give them something to get wrong.
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    module = module.to(dtype)
    return module, copy_of(module)


def copy_of(module):
    """Our module with the weights of torch's."""
    own = MultiHeadAttention(module.embed_dim, module.num_heads, bias=module.in_proj_bias is not None)
    own = own.to(module.out_proj.weight.dtype)
    weights = module.in_proj_weight.chunk(3)
    state = {f"{name}_proj.weight": weight for name, weight in zip("qkv", weights, strict=True)}
    if module.in_proj_bias is not None:
        biases = module.in_proj_bias.chunk(3)
        state |= {f"{name}_proj.bias": bias for name, bias in zip("qkv", biases, strict=True)}
    own.load_state_dict(
        state | {f"out_proj.{name}": value for name, value in module.out_proj.state_dict().items()}
    )
    return own


@jaxtyped(typechecker=beartype)
def run_checked(
    module,
    query,
    key,
    value,
    **options,
):
    """Output and weights with their axes checked; the fast road must give the same output."""
    output, weights = module(query, key, value, need_weights=True, **options)
    fast, none = module(query, key, value, **options)
    assert none is None
    torch.testing.assert_close(fast, output, **EXACT)
    return output, weights


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "masked", ["nothing", "queries x keys", "texts", "heads", "padding", "both", "causal"]
)
def test_equals_torch_with_copied_weights(bias, masked):
    theirs, ours = torch_twin(bias=bias)
    query = normal(BATCH, N_QUERIES, D_MODEL)
    key = normal(BATCH, N_KEYS, D_MODEL, seed=1)
    value = normal(BATCH, N_KEYS, D_MODEL, seed=2)
    padding = chance(BATCH, N_KEYS)
    scores = (BATCH, N_HEADS, N_QUERIES, N_KEYS)
    options, torch_mask = {
        "nothing": ({}, None),
        "queries x keys": ({"attn_mask": chance(*scores[2:])}, chance(*scores[2:])),
        "texts": (
            {"attn_mask": chance(BATCH, 1, *scores[2:])},
            chance(BATCH, 1, *scores[2:]).expand(scores).flatten(0, 1),
        ),
        "heads": ({"attn_mask": chance(*scores)}, chance(*scores).flatten(0, 1)),
        "padding": ({"key_padding_mask": padding}, None),
        "both": (
            {"key_padding_mask": padding, "attn_mask": chance(*scores[2:], seed=3)},
            chance(*scores[2:], seed=3),
        ),
        "causal": ({"is_causal": True}, torch.ones(scores[2:], dtype=torch.bool).tril()),
    }[masked]
    expected = theirs(
        query,
        key,
        value,
        attn_mask=None if torch_mask is None else ~torch_mask,  # torch: True = hidden
        key_padding_mask=~padding if "key_padding_mask" in options else None,
        average_attn_weights=False,
    )
    for got, want in zip(run_checked(ours, query, key, value, **options), expected, strict=True):
        torch.testing.assert_close(got, want, **EXACT)


def _projection(module):
    if isinstance(module, nn.Identity):
        return None
    bias = None if module.bias is None else module.bias.detach().numpy()
    return Projection(module.weight.detach().numpy(), bias)


@given(data=st.data())
@few_examples
def test_equals_the_oracle(data):
    n_queries, n_keys = data.draw(st.permutations(SIZES))[:2]
    num_heads = data.draw(st.integers(1, 4))
    d_head = data.draw(st.integers(1, 3))
    embed_dim = num_heads * d_head
    batch = data.draw(st.integers(1, 2))
    identity = data.draw(st.booleans())
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    module = MultiHeadAttention(
        embed_dim,
        num_heads,
        bias=data.draw(st.booleans()),
        identity=identity,
    ).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    query, key, value = (
        torch.randn(batch, n_queries, embed_dim).double(),
        *(torch.randn(batch, n_keys, embed_dim).double() for _ in range(2)),
    )
    scores = (batch, num_heads, n_queries, n_keys)
    shape = data.draw(
        st.sampled_from([None, scores[2:], (batch, 1, *scores[2:]), scores, (1, *scores[1:])])
    )
    # Rows may turn out empty here: the oracle knows what becomes of them.
    mask = None if shape is None else torch.rand(shape) > 0.4
    padding = torch.rand(batch, n_keys) > 0.3 if data.draw(st.booleans()) else None
    is_causal = data.draw(st.booleans())
    options = {"attn_mask": mask, "key_padding_mask": padding, "is_causal": is_causal}
    output, weights = run_checked(module, query, key, value, **options)

    may = torch.ones(scores, dtype=torch.bool)
    if mask is not None:
        may &= mask
    if padding is not None:
        may &= padding[:, None, None]
    for b in range(batch):
        expected = multi_head(
            query[b].numpy(),
            key[b].numpy(),
            value[b].numpy(),
            num_heads,
            **{
                name[0] if name != "out_proj" else "out": _projection(getattr(module, name))
                for name in PROJECTIONS
            },
            mask=may[b].numpy(),
            is_causal=is_causal,
        )
        np.testing.assert_allclose(output[b].detach(), expected[0], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(weights[b].detach(), expected[1], rtol=1e-11, atol=1e-12)


# The worked example: five tokens, four columns, numbers rounded to four decimals.

FOUR_DECIMALS = {"rtol": 0, "atol": 5.1e-5}


def worked(name):
    return torch.tensor(WORKED[name], dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_worked_example(num_heads, dtype):
    module = MultiHeadAttention(4, num_heads, identity=True)
    assert list(module.parameters()) == []
    output, weights = module(*(worked(name)[None].to(dtype) for name in "QKV"), need_weights=True)
    expected_weights, expected_output = {
        1: ([WORKED["single_head"]["weights"]], WORKED["single_head"]["output"]),
        2: ([WORKED["weights_head_1"], WORKED["weights_head_2"]], WORKED["output"]),
        4: (WORKED["four_heads"]["weights"], WORKED["four_heads"]["output"]),
    }[num_heads]
    torch.testing.assert_close(weights[0], torch.tensor(expected_weights, dtype=dtype), **FOUR_DECIMALS)
    torch.testing.assert_close(output[0], torch.tensor(expected_output, dtype=dtype), **FOUR_DECIMALS)
    if num_heads == 2:
        torch.testing.assert_close(
            weights[0].mean(0), worked("mean_of_two_heads").to(dtype), **FOUR_DECIMALS
        )


# Empty rows, empty keys, one token.


@pytest.mark.parametrize("need_weights", [True, False])
def test_a_text_of_padding_alone_gives_the_output_bias_and_no_nan_in_gradients(need_weights):
    _, ours = torch_twin()
    text = normal(BATCH, N_KEYS, D_MODEL).requires_grad_()
    padding = torch.ones(BATCH, N_KEYS, dtype=torch.bool)
    padding[1] = False
    output, weights = ours(text, key_padding_mask=padding, need_weights=need_weights)
    torch.testing.assert_close(output[1], ours.out_proj.bias.expand(N_KEYS, D_MODEL), **EXACT)
    if need_weights:
        assert (weights[1] == 0).all()
    output.square().sum().backward()
    assert text.grad is not None
    assert (text.grad[0] != 0).any()
    assert (text.grad[1] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


# What it refuses.


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([(2, 5, 7), (2, 5, 6), (2, 5, 6)], r"\(2, 5, 7\)"),
        ([(2, 5, 6), (2, 9, 7), (2, 9, 6)], r"\(2, 9, 7\)"),
        ([(2, 5, 6), (2, 9, 6), (2, 8, 6)], r"\(2, 8, 6\)"),
        ([(2, 5, 6), (9, 6), (9, 6)], r"\(9, 6\)"),
        ([(6,), (6,), (6,)], r"\(6,\)"),
        ([(1, 2, 5, 6)] * 3, r"\(1, 2, 5, 6\)"),
    ],
)
def test_wrong_shapes_are_refused_and_named(shapes, says):
    with pytest.raises(ValueError, match=says):
        MultiHeadAttention(6, 3)(*(torch.zeros(shape) for shape in shapes))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (
            {"attn_mask": torch.zeros(5, 9)},
            TypeError,
            "attn_mask must be boolean with True = may attend",
        ),
        ({"attn_mask": torch.ones(5, 9, dtype=torch.uint8)}, TypeError, "torch.uint8"),
        ({"key_padding_mask": torch.ones(2, 9)}, TypeError, "key_padding_mask must be boolean"),
        ({"attn_mask": torch.ones(9, 5).bool()}, ValueError, r"\(9, 5\)"),
        ({"attn_mask": torch.ones(2, 5, 9).bool()}, ValueError, r"\(2, 5, 9\)"),
        ({"attn_mask": torch.ones(3, 1, 5, 9).bool()}, ValueError, r"\(3, 1, 5, 9\)"),
        ({"attn_mask": torch.ones(9).bool()}, ValueError, r"\(9,\)"),
        ({"key_padding_mask": torch.ones(2, 5).bool()}, ValueError, r"\(2, 9\).*\(2, 5\)"),
        ({"key_padding_mask": torch.ones(9).bool()}, ValueError, r"\(2, 9\).*\(9,\)"),
    ],
)
def test_wrong_masks_are_refused_with_the_convention(options, error, says):
    with pytest.raises(error, match=says):
        MultiHeadAttention(6, 3)(torch.zeros(2, 5, 6), torch.zeros(2, 9, 6), **options)
