"""A plain torch Transformer on rows of a table: which columns each column attends to.

See what its heads do with `python examples/inputs/encoder.py`.
"""

import torch
from torch import nn

import attnscope

COLUMNS = ("age", "income", "rent", "children", "distance", "tenure")


def example():
    """A random nn.TransformerEncoder, 20 rows of six numbers, and the names of the columns behind [CLS]."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    columns = torch.randn(1 + len(COLUMNS), 32)
    rows = torch.cat([torch.ones(20, 1), torch.randn(20, len(COLUMNS))], 1)
    return nn.TransformerEncoder(layer, 2), rows[..., None] * columns, ["[CLS]", *COLUMNS]


if __name__ == "__main__":
    network, rows, columns = example()
    model = attnscope.load(network, inputs=rows, labels=columns)
    print(attnscope.heads(model, model.texts).save("heads.npz"))
