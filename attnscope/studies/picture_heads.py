"""What does each head of a vision transformer do? A model and any number of photos in, measures out."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.corpus import expand
from attnscope.errors import AttnscopeError
from attnscope.models.model import Model, eyes_of
from attnscope.records.findings import PICTURES, Estimate, Findings, Head
from attnscope.records.storage import finite
from attnscope.senses.photos import Photo, read_photo
from attnscope.studies.block_sums import undisturbed
from attnscope.studies.heatmap import run_probe
from attnscope.studies.overflow import require_finite
from attnscope.studies.provenance import run_of
from attnscope.studies.reading import Reading, read
from attnscope.studies.texts import Progress, Report

if TYPE_CHECKING:
    from attnscope.core.measures.catalogue import Measure
    from attnscope.core.picture_sums import PictureSums
    from attnscope.core.running import RunningSums

_BLANK = np.full((256, 256, 3), 128, np.uint8)


def picture_heads(model: Model, images: Any, report: Report | None = None) -> Findings:
    """Measures every head of a vision transformer on photos.

        found = attnscope.picture_heads(model, "photos/*.jpg")
        found.grid("encoder", "distance_patches")        # (layer, head)
        found.heads[0].measures["near_patches"]          # value, 95% interval over pictures, value of uniform attention
        found.options["measures"]                        # what each measure is, with its formula
        found.save("heads.npz")

    The measures are `core.picture_measures.PICTURE_MEASURES`; there are no roles. Every picture is run by itself, and
    no map is kept. What cannot be read is listed in `corpus["problems"]`, and the others are studied. An interruption
    (KeyboardInterrupt) ends the study: what was done is returned, and said to be incomplete.

    Args:
        model: A loaded vision model whose layers all see all patches: ViT, DeiT, DINOv2 …
        images: A file or a pattern, a list of these, or of images of Pillow or arrays (height, width, 3) of uint8.
        report: Called after each picture.

    Returns:
        The findings: `corpus["of"]` is "pictures", so its texts are pictures and its tokens are patches.

    Raises:
        AttnscopeError: The model sees no pictures, or there is not one that can be read.
    """
    model = eyes_of(model)
    given = listed(images, "picture")
    # What is wrong with the model is wrong with every picture.
    read(model, read_photo(_BLANK))
    done = _Done()
    complete = True
    try:
        for number, (name, image) in enumerate(given, 1):
            done.add(model, name, image)
            if report is not None:
                report(Progress(done.n_pictures, done.n_patches, number / len(given)))
    except KeyboardInterrupt:
        if not done.n_pictures:
            raise
        complete = False
    if done.measures is None or done.uniform is None:
        raise AttnscopeError(
            f"no picture is left of {len(given)}: {told(done.problems[0])}",
            "give photos, such as --image 'photos/*.jpg'",
        )
    corpus = {
        "of": PICTURES,
        "sources": [name for name, _ in given],
        "n_texts": done.n_pictures,
        "n_tokens": done.n_patches,
        "grids": sorted(done.grids),
        "sha256": done.digest.hexdigest(),
        "shards": ["1/1"],
        "problems": done.problems,
        "complete": complete,
    }
    notes = list(dict.fromkeys(done.notes))
    if done.n_pictures == 1:
        notes.append("of one picture there are no intervals")
    from attnscope.core.picture_measures import PICTURE_MEASURES

    sums = done.measures, done.uniform, done.layers
    heads = heads_of("encoder", PICTURE_MEASURES, *sums, resting=lambda measures: measures["resting"].value)
    return Findings(
        run_of(model.info, notes), corpus, described(PICTURE_MEASURES), heads,
        sums_of("encoder", PICTURE_MEASURES, *sums),
    )  # fmt: skip


@dataclass
class _Done:
    """What was added up over pictures; (layer, head, measure) both of them, of uniform attention one head of one layer.

    A picture is in all of it or in nothing.
    """

    measures: RunningSums | None = None
    uniform: RunningSums | None = None
    layers: tuple[int, ...] = ()
    n_pictures: int = 0
    n_patches: int = 0
    grids: set[tuple[int, int]] = field(default_factory=set)
    problems: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, model: Model, name: str, image: Any) -> None:
        """Runs the model on a picture, and adds its measures; or lists it where it cannot be read."""
        try:
            photo = read_photo(image)
            reading = read(model, photo)
            probe = _measured(model, reading)
        except AttnscopeError as error:
            reason = error.message.replace(f"{name} ", "", 1)
            self.problems.append({"source": name, "line": None, "reason": reason})
            return
        with undisturbed():
            self._take(photo, reading, probe)

    def _take(self, photo: Photo, reading: Reading, probe: PictureSums) -> None:
        from attnscope.core.running import RunningSums

        (by_layer,) = probe.sums.values()
        layers = tuple(sorted(by_layer))
        found = [stacked([by_layer[layer][part] for layer in layers]) for part in (0, 1)]
        assert probe.uniform is not None and reading.picture is not None
        even = [part.T[None, None] for part in probe.uniform]
        if self.measures is None or self.uniform is None:
            self.layers = layers
            self.measures, self.uniform = RunningSums(found[0].shape[1:]), RunningSums((1, *even[0].shape[2:]))
        self.measures.add(*found)
        self.uniform.add(*even)
        self.n_pictures += 1
        self.n_patches += math.prod(reading.picture.grid)
        self.grids.add(reading.picture.grid)
        self.notes += reading.notes
        pixels = np.asarray(photo.image)
        self.digest.update(f"picture {pixels.shape}\n".encode() + pixels.tobytes())


def _measured(model: Model, reading: Reading) -> PictureSums:
    """The measures of each layer on one picture.

    Raises:
        AttnscopeError: The model computes NaN.
    """
    from attnscope.core.picture_measures import picture_facts
    from attnscope.core.picture_sums import PictureSums

    picture = reading.picture
    assert picture is not None
    n_before = len(reading.tokens) - math.prod(picture.grid)
    probe = PictureSums(picture_facts(picture.pixels, picture.grid, reading.tokens.labels[:n_before]))
    run_probe(model, reading, probe)
    by_kind = {str(kind): {at: found.sums[None] for at, found in of.items()} for kind, of in probe.sums.items()}
    require_finite(by_kind, model.info, picture.source)
    return probe


def stacked(arrays: Sequence[Any]) -> Any:
    """(measure, head) of each layer as (1, layer, head, measure); nothing is counted where a layer has fewer heads."""
    stacked = np.zeros((1, len(arrays), max(array.shape[1] for array in arrays), arrays[0].shape[0]))
    for row, array in enumerate(arrays):
        stacked[0, row, : array.shape[1]] = array.T
    return stacked


def heads_of(
    kind: str,
    catalogue: Mapping[str, Measure],
    sums: RunningSums,
    uniform: RunningSums,
    layers: Sequence[int],
    resting: Callable[[Mapping[str, Estimate]], float],
) -> tuple[Head, ...]:
    """Every head with its measures; without those that nothing defines."""
    values, counts = sums.ratio(), sums.total("c")
    ends = [np.array([getattr(one, end) for one in catalogue.values()]) for end in ("low", "high")]
    low, high = (np.clip(end, *ends) for end in sums.interval())
    even = np.broadcast_to(uniform.ratio(), values.shape)
    heads = []
    for at in np.ndindex(*values.shape[:2]):
        if not counts[at].any():
            continue
        columns = zip(*(array[at].tolist() for array in (values, low, high, even, counts)), strict=True)
        measures = {name: Estimate(*numbers) for name, numbers in zip(catalogue, columns, strict=True) if numbers[-1]}
        heads.append(Head(kind, layers[at[0]], at[1], (), resting(measures), measures))
    return tuple(heads)


def sums_of(
    kind: str, catalogue: Mapping[str, Measure], sums: RunningSums, uniform: RunningSums, layers: Sequence[int]
) -> dict[str, Any]:
    """All that was added up, for a record."""
    parts = {"measures": sums, "uniform": uniform}
    arrays = {f"{kind}.{part}.{name}": a for part, held in parts.items() for name, a in held.to_arrays().items()}
    return arrays | {f"{kind}.layers": np.array(layers), f"{kind}.names": np.array(list(catalogue))}


def described(catalogue: Mapping[str, Measure]) -> dict[str, Any]:
    """What measures mean, so that a record explains itself."""
    return {
        "roles": {},
        "measures": {
            name: {
                "what": measure.what,
                "formula": measure.formula,
                "unit": measure.unit,
                "range": [finite(measure.low), finite(measure.high)],
                "source": measure.source,
            }
            for name, measure in catalogue.items()
        },
    }


def listed(given: Any, what: str) -> list[tuple[str, Any]]:
    """Pictures or recordings with what to call each; files and patterns are looked up."""
    found = list(_named(given if isinstance(given, list) else [given], what))
    if not found:
        raise AttnscopeError(f"there is no {what} to study", "give at least one file")
    return found


def _named(given: Sequence[Any], what: str) -> Iterator[tuple[str, Any]]:
    yield from ((name, name) for name in expand([one for one in given if isinstance(one, str | Path)]))
    for number, one in enumerate(given, 1):
        if not isinstance(one, str | Path):
            yield f"{what} {number}", one


def told(problem: dict[str, Any]) -> str:
    """What is wrong with a source."""
    return f"{problem['source']}: {problem['reason']}"
