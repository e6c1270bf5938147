"""`attnscope merge`."""

from pathlib import Path
from typing import Annotated

import typer

from attnscope.cli import groups, options
from attnscope.options import refuse_beside
from attnscope.studies.inputs.options import LoadOptions


@groups.command(omit=("out", "scale", "cmap", "engine", "dtype"))
def merge(
    *,
    parts: Annotated[list[Path], "Records of shards (heads.npz, atlas.npz), or the folders that hold them."],
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            help="For an atlas: the model that rereads the selected texts.  [default: as its parts name it]",
        ),
        "Model",
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="A folder for the whole."), "Output"],
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Join the records of shards into the record of the whole corpus, bit for bit."""
    from attnscope.output import plan
    from attnscope.records import file_of, load_record
    from attnscope.records.atlas.record import Atlas
    from attnscope.records.heads.findings import Findings
    from attnscope.studies.heads.merging import merge_findings

    paths = [file_of(part) for part in parts]
    if isinstance(load_record(paths[0]), Atlas):
        from attnscope.studies.atlas.parts import merge_files

        output = plan("atlas", out, where.formats, **vars(printing), **drawing.options())
        with options.progress(printing.quiet) as report:
            record = merge_files([(path, Atlas.load(path)) for path in paths], model, loading, report)
        return output.deliver(record)
    refuse_beside("parts of heads", model=model)
    output = plan("heads", out, where.formats, **vars(printing), **drawing.options())
    return output.deliver(merge_findings([Findings.load(path) for path in paths], [str(path) for path in paths]))
