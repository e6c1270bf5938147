"""From files of text to an atlas."""

from dataclasses import dataclass

from attnscope.records.atlas import Atlas
from attnscope.studies.atlas import AtlasOptions, atlas
from attnscope.studies.causal import with_effects
from attnscope.studies.heads_order import StudyOrder, heads_options, require_names
from attnscope.studies.inputs import LoadOptions
from attnscope.studies.late import try_step, whole
from attnscope.studies.texts import Report, scale_report
from attnscope.studies.workers import Workers


@dataclass(frozen=True)
class AtlasOrder:
    """What the command line asks for; see `attnscope atlas --help`."""

    heads: StudyOrder
    rank: str
    examples: int
    sample: int


def study(
    spec: str, order: AtlasOrder, loading: LoadOptions, report: Report | None, workers: Workers | None = None
) -> Atlas:
    """Loads a model, and makes an atlas of its heads.

    Raises:
        AttnscopeError: Anything that the user can mend.
    """
    options = AtlasOptions(heads_options(order.heads), order.rank, order.examples, order.sample)
    texts = order.heads.texts.corpus()
    require_names(order.heads)
    model = loading.load(spec)
    n_steps = 2 if order.heads.causal else 1
    found = atlas(model, texts, options, scale_report(report, 0, n_steps), workers)
    if order.heads.causal and whole(found):
        found = try_step(found, "--causal", lambda known: with_effects(known, model, texts, scale_report(report, 1, 2)))
    return found
