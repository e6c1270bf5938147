"""`attnscope atlas`."""

from dataclasses import replace
from typing import Annotated

import typer

from attnscope.cli import groups, options
from attnscope.studies.inputs.options import LoadOptions, TextsWanted
from attnscope.studies.running.options import SharedWork


@groups.command(
    out="The page to write, such as atlas.html; or a folder, or a file of another format.",
    formats="Files to write: several of html, npz, csv, json, parquet.  [default: html,npz, or that of the file]",
)
def atlas(
    *,
    texts: TextsWanted,
    model: groups.Model = "minilm",
    rank: Annotated[
        str,
        typer.Option(
            help="What examples of a head are ranked by: content_nats (attention excluding special tokens and the "
            "first, times nats from uniform), or a measure.",
            autocompletion=options.complete_measures,
        ),
    ] = "content_nats",
    examples: Annotated[int, typer.Option(min=0, max=100, help="How many of the best texts of each head.")] = 10,
    sample: Annotated[int, typer.Option(min=1, max=8192, help="How many texts are drawn for deciles.")] = 512,
    measuring: groups.Measuring,
    causal: Annotated[bool, "Take each head that has a role out, and say what changes."] = False,
    shard: groups.Shard = "1/1",
    beside: groups.With = None,
    folder: groups.Folder = False,
    describing: groups.Describing,
    listing: groups.Listing,
    where: groups.Where,
    running: SharedWork,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Show every head of a model with the texts that say what it does: one page, offline.

    Each head has the texts on which it does most, one of each decile, those that its description fails on, where it
    attends, and which queries, keys and pairs stand out.

    - `attnscope atlas --file sample_texts/alice.txt -o atlas.html`
    - `attnscope atlas --file 'corpus/*.txt.gz' -m ./model --workers 8 -o atlas.html -f html,npz`
    - `attnscope atlas --file 'corpus/*.txt.gz' --rank induction -o induction.html`
    - `attnscope atlas --file 'corpus/*.txt.gz' --shard 2/8 -o part2`
    - `attnscope atlas --file 'corpus/*.txt.gz' -m ./model --folder -o site`
    """
    from attnscope.studies.atlas.order import AtlasOrder, study
    from attnscope.studies.heads.order import StudyOrder

    where = where if shard == "1/1" else replace(where, formats=where.formats or "npz")
    output = where.plan("atlas", printing, measures=measuring.measures, folder=folder or None, **listing.shown())
    study_of_heads = StudyOrder(
        texts=texts, probe=None, **measuring.order(), control=None, shard=shard, causal=causal,
        describe=describing.options(), where=listing.only,
    )  # fmt: skip
    order = AtlasOrder(study_of_heads, rank, examples, sample, tuple(beside or ()))
    shared = running.share(model, loading)
    with options.progress(printing.quiet) as report:
        found = study(model, order, loading, report, shared)
    output.deliver(found)
