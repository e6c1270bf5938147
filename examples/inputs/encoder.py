"""A plain torch Transformer on rows of a table: which columns each column attends to.

Run it with `attnscope ablate -m examples/inputs/encoder.py --trust-remote-code -o encoder`.
"""

import torch
from torch import nn

COLUMNS = ("age", "income", "rent", "children", "distance", "tenure")


def attnscope_model():
    """A random nn.TransformerEncoder, 20 rows of six numbers, and the names of the columns behind [CLS]."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    columns = torch.randn(1 + len(COLUMNS), 32)
    rows = torch.cat([torch.ones(20, 1), torch.randn(20, len(COLUMNS))], 1)
    return nn.TransformerEncoder(layer, 2), rows[..., None] * columns, ["[CLS]", *COLUMNS]
