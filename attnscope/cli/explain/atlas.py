"""`attnscope atlas`."""

from dataclasses import replace

from attnscope.cli import groups, options
from attnscope.studies.atlas.options import AtlasOrder
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.running.options import SharedWork


@groups.command(
    omit=("control", "every"),
    out="The page to write, such as atlas.html; or a folder, or a file of another format.",
    formats="Files to write: several of html, npz, csv, json.  [default: html,npz, or that of the file]",
    measures="Also print these measures, such as entropy_nats,positional; all: every one.",
    sort="List heads by layer, by explained (the best described first), or by entropy (the sharpest first).  "
    "[default: layer]",
)
def atlas(
    *,
    texts: TextsWanted,
    model: groups.Model = "minilm",
    order: AtlasOrder,
    describing: groups.Describing,
    where: groups.Where,
    running: SharedWork,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Show every head of a model with the texts that show what it does, in one page.

    Each head has the texts on which it does most, one of each decile, and those where its description fails. You also
    see where it attends, and which queries, keys and pairs stand out.

    - `attnscope atlas --file sample_texts/alice.txt --split paragraph -o atlas.html`
    - `attnscope atlas --file 'corpus/*.txt.gz' -m ./model --workers 8 -o atlas.html -f html,npz`
    - `attnscope atlas --file 'corpus/*.txt.gz' --rank induction -o induction.html`
    """
    from attnscope.studies.atlas.study import study
    from attnscope.studies.heads.study import require_names

    heads = replace(order.atlas.heads, describe=describing.options())
    order = replace(order, atlas=replace(order.atlas, heads=heads))
    output = where.plan("atlas", printing, measures=order.measures, **order.listing.plan_options())
    shared = running.share(model, loading)
    require_names(heads, order.measures)
    with options.progress(printing.quiet) as report:
        record = study(model, texts, order, loading, report, shared)
    output.deliver(record)
