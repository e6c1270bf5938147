"""`attnscope rollout`."""

from typing import Annotated

import typer

from attnscope.choice import Tokens
from attnscope.cli import groups
from attnscope.options import refuse_beside
from attnscope.studies.inputs.options import LoadOptions, OneText


@groups.command(
    omit=("words", "hide_special"),
    formats="Several of png, svg, pdf, npz, json.  [default: npz,png]",
    scale="The weight of the darkest colour: 1 (fixed), each map's largest (head), the figure's (figure).  "
    "[default: figure; head for pictures]",
)
def rollout(
    *,
    source: OneText,
    image: groups.Image = None,
    model: groups.Model = "minilm",
    tokens: Tokens,
    residual: Annotated[
        float,
        typer.Option(min=0, max=1, help="The share of each layer's output that comes through the residual connection."),
    ] = 0.5,
    where: groups.Where,
    drawing: groups.Drawing,
    loading: LoadOptions,
    printing: groups.Printing,
) -> None:
    """Estimate how much of each input token reaches a position: attention rollout.

    It uses attention alone, averaged over heads (Abnar & Zuidema 2020).

    - `attnscope rollout "The animal didn't cross the street because it was too tired." --query it`
    - `attnscope rollout "…" -o out --format npz,pdf`
    - `attnscope rollout --image photo.jpg -m ./dinov2-small -o out`
    """
    from attnscope.senses.photos import read_photo
    from attnscope.studies.inputs.reading import Prompt
    from attnscope.studies.maps.rollout import picture_rollout
    from attnscope.studies.maps.rollout import rollout as study

    output = where.plan("rollout", printing, query=tokens.query, **drawing.options())
    if image is not None:
        refuse_beside("--image", source)
        photo = read_photo(image)  # before the model takes its time
        return output.deliver(picture_rollout(loading.load(model), photo, residual=residual))
    text = source.read()
    loaded = loading.load_to_look(model, [Prompt(text)])
    return output.deliver(study(loaded, text, residual=residual, query=tokens.query))
