"""Declare the options of `attnscope atlas` and `attnscope.atlas`. Loads nothing heavy."""

from attnscope.errors import require_choice
from attnscope.options import group, option, options, seed_option
from attnscope.studies.heads.options import HeadsOptions

CONTENT_SCORE = "content_nats"
"""The default score by which the texts of a head are ranked. Every other score is a measure of heads."""


@options
class AtlasHeads(HeadsOptions):
    """Hold the options of `heads` for use in an atlas. An atlas never runs an untrained model as a control."""

    control: bool = option("There is none.", default=False, python_only=True)


@options
class AtlasOptions:
    """Choose how an atlas is made.

    A seeded hash of each text's content orders the texts at random, and the first ones are the sample. Profiles, token
    tables and distances use only the first texts of the sample; `rows.TOKENS_PER_SAMPLED_TOKEN` limits their number.
    """

    rank: str = option(
        "How a head's examples are ranked: by content_nats (attention outside special tokens and the first, times nats "
        "from uniform), or by a measure.",
        "--examples-by",
        default=CONTENT_SCORE,
    )
    examples: int = option(
        "How many of its best texts each head shows.",
        default=10,
        least=0,
        most=100,
    )
    sample: int = option(
        "How many texts are drawn at random for the deciles.",
        default=512,
        least=1,
        most=8192,
        python_only=True,
    )
    heads: HeadsOptions = group(AtlasHeads)
    seed: int = seed_option("the hashes by which texts are drawn", python_only=True)

    def require(self) -> None:
        """Refuse a score that does not exist."""
        from attnscope.core.catalogue import measure_names

        require_choice("measure", self.rank, (CONTENT_SCORE, *measure_names()))
