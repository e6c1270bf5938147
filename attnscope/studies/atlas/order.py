"""From files of text to an atlas."""

from dataclasses import dataclass
from pathlib import Path

from attnscope.errors import UsageError
from attnscope.records.atlas.evidence import require_evidence, with_records
from attnscope.records.atlas.record import Atlas
from attnscope.studies.ablation.causal import with_effects
from attnscope.studies.atlas.study import AtlasOptions, atlas
from attnscope.studies.heads.order import StudyOrder, heads_options, require_names
from attnscope.studies.inputs.options import LoadOptions
from attnscope.studies.inputs.texts import Report, scale_report
from attnscope.studies.running.late import try_step, whole
from attnscope.studies.running.workers import Workers


@dataclass(frozen=True)
class AtlasOrder:
    """What the command line asks for; see `attnscope atlas --help`."""

    heads: StudyOrder
    rank: str
    examples: int
    sample: int
    beside: tuple[Path, ...] = ()


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
    if order.heads.causal and options.heads.shard != (1, 1):
        raise UsageError("heads are taken out in a whole study, not in a shard", "leave out --causal or --shard")
    if order.beside and options.heads.shard != (1, 1):
        raise UsageError("what other records say is of the whole", "give --with to merge's atlas: show --with")
    require_evidence(order.beside)
    model = loading.load(spec)
    n_steps = 2 if order.heads.causal else 1
    found = atlas(model, texts, options, scale_report(report, 0, n_steps), workers)
    if order.heads.causal and whole(found):
        found = try_step(found, "--causal", lambda known: with_effects(known, model, texts, scale_report(report, 1, 2)))
    return with_records(found, order.beside)
