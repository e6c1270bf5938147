"""Define MultiHeadAttention, the attention layer of the project's own models.

The layer projects its inputs, splits them into heads, and passes an AttentionCall through the *seam*: the one function
call through which attention is computed, by `seam.attend` or by a probe (a hook). Then the layer joins the heads and
projects them. Positions, residuals and norms are left to the models.

Source:
    Vaswani et al. 2017, section 3.2.2.
"""

from collections.abc import Callable

from torch import Tensor, nn

from attnscope.core.attention.seam import (
    AttentionCall,
    Kind,
    Probe,
    attend,
    attend_with_weights,
    attention_weights,
    require_boolean_mask,
)

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class MultiHeadAttention(nn.Module):
    """Compute multi-head attention with separate projections.

        head_h = softmax(scale * Q_h K_hᵀ) V_h,  Q = query W_Qᵀ + b_Q,  K = key W_Kᵀ + b_K,  V = value W_Vᵀ + b_V
        output = [head_0 | … | head_(H-1)] W_Oᵀ + b_O,  scale = 1 / sqrt(d_head),  d_head = embed_dim / num_heads

    Head h takes columns h * d_head up to (h + 1) * d_head of Q, K and V.

    MASKS: True = MAY ATTEND, in both masks, as in torch's scaled_dot_product_attention. **torch.nn.MultiheadAttention
    means the OPPOSITE** (True = hidden, True = padding): invert its masks with `~` before you pass them. A query that
    may attend to nothing gets weights of zero (not NaN) and the output projection's bias.

    Unlike torch.nn.MultiheadAttention, the batch comes first, and weights are per head (never averaged) and before
    dropout.

    Args:
        embed_dim: Width of queries and output; a multiple of num_heads.
        num_heads: How many heads.
        bias: Whether the four projections add a bias.
        dropout: Probability with which single weights are dropped in training.
        identity: Whether to leave out all projections. Heads then take column slices of the input, and the joined heads
            are the output, so that you can follow the arithmetic by hand.
        layer: The index of the layer in an AttentionCall. Probes tell layers apart by it.
        kind: The kind of attention in an AttentionCall: "encoder", "decoder" or "cross".

    Attributes:
        q_proj: Linear layer for Q. With `identity`, all four are `nn.Identity`.
        k_proj: Linear layer for K.
        v_proj: Linear layer for V.
        out_proj: Linear layer from the joined heads to the output.

    Raises:
        ValueError: embed_dim is no multiple of num_heads, a number is less than 1, or dropout is no probability.

    Source:
        Vaswani et al. 2017, section 3.2.2.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        bias: bool = True,
        dropout: float = 0.0,
        identity: bool = False,
        layer: int = 0,
        kind: Kind = "encoder",
    ) -> None:
        super().__init__()
        if min(embed_dim, num_heads) < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}")
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout is a probability; got {dropout}")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.d_head = embed_dim // num_heads
        self.dropout = dropout
        self.layer = layer
        self.kind = kind
        for name in PROJECTIONS:
            setattr(self, name, nn.Identity() if identity else nn.Linear(embed_dim, embed_dim, bias))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise weights at random (Glorot and Bengio 2010, uniform), and set biases to zero."""
        for projection in self.children():
            if isinstance(projection, nn.Linear):
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        need_weights: bool = False,
        probe: Probe | None = None,
        turn: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from queries to keys.

        Args:
            query: (batch, query, embed_dim).
            key: (batch, key, embed_dim); None = the queries (self-attention).
            value: (batch, key, embed_dim); None = the keys.
            attn_mask: Boolean, True = MAY ATTEND (torch.nn.MultiheadAttention: the opposite). It has the shape (query,
                key) for all texts and heads, (batch, 1, query, key) for each text, or (batch, num_heads, query, key)
                for each head. A batch of 1 broadcasts to all texts.
            key_padding_mask: Boolean, True = A REAL TOKEN that may be attended to, False = padding
                (torch.nn.MultiheadAttention: the opposite); (batch, key).
            is_causal: Whether query i may attend to keys 0..i only, in addition to the masks. With more keys than
                queries, the causal mask is aligned at the upper left.
            need_weights: Whether to return the weights too. The output is then computed from the dense weights, slower
                and in O(query * key) memory.
            probe: A function that computes attention instead of `attend`: gets the AttentionCall, returns its output.
            turn: A function that rotates queries and keys by their positions (RoPE). It gets and returns both, each
                (batch, num_heads, token, d_head).

        Returns:
            The output, (batch, query, embed_dim); and the weights of each head before dropout, (batch, num_heads,
            query, key), float32 or better. They are None unless `need_weights`. If there are no keys, each query may
            attend to nothing.

        Raises:
            ValueError: Shapes do not fit; the message has them.
            TypeError: A mask is not boolean.
        """
        # Without keys, this is self-attention; without values, the keys are the values.
        key = query if key is None else key
        value = key if value is None else value
        has_right_shape = [
            tensor.ndim == 3 and tensor.shape[2] == self.embed_dim for tensor in (query, key)
        ]
        if key.shape != value.shape or not all(has_right_shape):
            raise ValueError(
                f"query, key and value are (batch, token, {self.embed_dim}), keys as many as values; got "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        # Project, and split into heads: (batch, token, embed_dim) becomes (batch, num_heads, token, d_head).
        queries = self._split_heads(self.q_proj(query))
        keys = self._split_heads(self.k_proj(key))
        if turn is not None:
            queries, keys = turn(queries, keys)
        batch, n_queries, _ = query.shape
        mask = self._merge_masks(attn_mask, key_padding_mask, batch, n_queries, key.shape[1])
        call = AttentionCall(
            layer=self.layer,
            kind=self.kind,
            query=queries,
            key=keys,
            value=self._split_heads(self.v_proj(value)),
            scale=self.d_head**-0.5,
            mask=mask,
            is_causal=is_causal,
            dropout_p=self.dropout if self.training else 0.0,
        )
        # Compute attention: by the probe if there is one, from the weights if they are needed, or by a fused kernel.
        # The outputs of the heads are (batch, num_heads, query, d_head).
        weights: Tensor | None = None
        if probe is not None:
            head_outputs = probe(call)
            if need_weights:
                weights = attention_weights(call)
        elif need_weights:
            head_outputs, weights = attend_with_weights(call)
        else:
            head_outputs = attend(call)
        # Join the heads: (batch, num_heads, query, d_head) becomes (batch, query, embed_dim).
        joined = head_outputs.transpose(1, 2).flatten(2)
        return self.out_proj(joined), weights

    def _split_heads(self, projected: Tensor) -> Tensor:
        """Split into heads: (batch, token, embed_dim) becomes (batch, num_heads, token, d_head)."""
        batch, n_tokens, _ = projected.shape
        return projected.reshape(batch, n_tokens, self.num_heads, self.d_head).transpose(1, 2)

    def _merge_masks(
        self,
        attn_mask: Tensor | None,
        key_padding_mask: Tensor | None,
        batch: int,
        n_queries: int,
        n_keys: int,
    ) -> Tensor | None:
        """Return both masks as one, broadcastable to (batch, num_heads, query, key); None if there is no mask.

        Raises:
            ValueError: The shape of a mask does not fit.
            TypeError: A mask is not boolean.
        """
        if attn_mask is not None:
            require_boolean_mask("attn_mask", attn_mask)
            # Refuse a size of 1 for queries or keys, although it would broadcast: it is usually a mistake.
            if attn_mask.ndim not in (2, 4) or attn_mask.shape[-2:] != (n_queries, n_keys):
                raise ValueError(
                    f"attn_mask must be (query, key) = {(n_queries, n_keys)}, or that for each text and head; got "
                    f"{tuple(attn_mask.shape)}"
                )
        if key_padding_mask is None:
            return attn_mask
        require_boolean_mask("key_padding_mask", key_padding_mask)
        if key_padding_mask.shape != (batch, n_keys):
            raise ValueError(
                f"key_padding_mask must be (batch, key) = {(batch, n_keys)}; got {tuple(key_padding_mask.shape)}"
            )
        # (batch, 1, 1, key): all heads and queries share it.
        padding = key_padding_mask[:, None, None, :]
        return padding if attn_mask is None else attn_mask & padding
