"""What is measured of heads' writing, beside where they look: the catalogue. Imports no torch."""

import math

from attnscope.core.measures.catalogue import Measure

PARTS = ("logit", "heads", "feed_forward", "embeddings", "biases")
"""What is measured of answers' logits: the whole, and what it is the sum of."""

_INF = math.inf
_DIRECT = "direct logit attribution: Elhage et al. 2021; on the right answer: Wang et al. 2023"

_ALL = "all predictions"
_OFF = " / sum of A_qk over k excluding sinks"
_CONTROL = "; less the same for that token at its control"
_THERE = "predictions whose answer stands in what is read, and that have a control"
_PREDICTED = (
    "predictions where a token of what is read would be among the ten likeliest without the head, and is raised above "
    "its logit at its control"
)
_REPEATED = "predictions of a decoder at a token that came before"

WRITTEN: dict[str, Measure] = {
    one.name: one
    for one in (
        Measure(
            "writes", "adds to the logit of the right answer by itself, above the vocabulary's mean", "z_q · g(a)",
            "nats", -_INF, _INF, _DIRECT, counts=_ALL,
        ),
        Measure(
            "writes_attended", "adds to the logit of an answer that it attends to", "z_q · g(a)",
            "nats", -_INF, _INF, "ours", counts="predictions whose answer gets a tenth of the head's weight or more",
        ),
        Measure(
            "writes_elsewhere", "adds to the logit of an answer that it does not attend to", "z_q · g(a)",
            "nats", -_INF, _INF, "ours", counts="all others",
        ),
        Measure(
            "answer_weight", "gives its weight to the answer's own occurrences in what is read",
            "sum of A_qk over k with x_k = a", "share", 0.0, 1.0, "Wang et al. 2023, section 3.3", counts=_ALL,
        ),
        Measure(
            "copying_nats", "raises the answer's logit by what it reads at the answer's own occurrences",
            "sum of A_qk v_k · (g(a) - g(b)) over k with x_k = a," + _OFF + _CONTROL, "nats",
            -_INF, _INF, "after Wang et al. 2023, section 3.3; matched tokens: ours", counts=_THERE,
        ),
        Measure(
            "copying_weight", "attends to the answer more than to another token that stands there as often",
            "sum of A_qk over x_k = a, less that over x_k = b," + _OFF + _CONTROL,
            "share", -2.0, 2.0, "ours", counts=_THERE,
        ),
        Measure(
            "copying_share",
            "attends outside sinks (special tokens, the first) where the answer occurs in what is read",
            "sum of A_qk over k excluding sinks", "share", 0.0, 1.0, "ours", counts=_THERE,
        ),
        Measure(
            "suppression_nats", "lowers the logit of what the rest of the model would copy, by what it reads there",
            "- sum of A_qk v_k · (g(t) - g(b)) over k with x_k = t," + _OFF + _CONTROL, "nats",
            -_INF, _INF, "after McDougall et al. 2023, section 3; matched tokens: ours", counts=_PREDICTED,
        ),
        Measure(
            "suppression_weight", "attends to what the rest of the model would copy, more than to a token as frequent",
            "sum of A_qk over x_k = t, less that over x_k = b," + _OFF + _CONTROL, "share", -2.0, 2.0,
            "after McDougall et al. 2023, section 3", counts=_PREDICTED,
        ),
        Measure(
            "suppression_share",
            "attends outside sinks (special tokens, the first) where the rest of the model would copy",
            "sum of A_qk over k excluding sinks", "share", 0.0, 1.0, "ours", counts=_PREDICTED,
        ),
        Measure(
            "induction_nats", "raises the logit of what came after the same token before, by what it reads there",
            "sum of A_qk v_k · (g(t) - g(b)) over k < q with x_k = t, x_k-1 = x_q," + _OFF, "nats",
            -_INF, _INF, "after Olsson et al. 2022; matched tokens: ours", counts=_REPEATED,
        ),
        Measure(
            "induction_weight", "attends to what came after the same token before, more than to a token as frequent",
            "sum of A_qk over k < q with x_k = t, x_k-1 = x_q, less that over x_k = b," + _OFF, "share", -1.0, 1.0,
            "after Olsson et al. 2022", counts=_REPEATED,
        ),
        Measure(
            "induction_share",
            "attends outside sinks (special tokens, the first) at a token that came before",
            "sum of A_qk over k excluding sinks", "share", 0.0, 1.0, "ours", counts=_REPEATED,
        ),
    )
}  # fmt: skip
"""By name, in the order of the sums."""
