"""Where does each head of a speech model listen? A model and any number of recordings in, measures out."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from attnscope.errors import AttnscopeError
from attnscope.models.model import Model
from attnscope.records.findings import RECORDINGS, Findings
from attnscope.senses.recordings import read_recording
from attnscope.studies.block_sums import undisturbed
from attnscope.studies.heatmap import run_probe
from attnscope.studies.picture_heads import described, heads_of, listed, sums_of, told
from attnscope.studies.provenance import run_of
from attnscope.studies.reading import Speech, read
from attnscope.studies.relation_sums import only
from attnscope.studies.texts import Progress, Report

if TYPE_CHECKING:
    from attnscope.core.running import RunningSums


def sound_heads(
    model: Model, audio: Any, text: str | Sequence[str] | None = None, report: Report | None = None
) -> Findings:
    """Measures every head of a speech model's cross-attention on recordings.

        found = attnscope.sound_heads(attnscope.load("./whisper-tiny"), "talks/*.wav")
        found.grid("cross", "monotonicity")     # (layer, head): 1 = listens further on with each token

    The measures are `core.sound_measures.SOUND_MEASURES`; there are no roles. Every recording is run by itself, with
    its transcript or what the model writes; no map is kept. What cannot be read is listed in `corpus["problems"]`, and
    the others are studied. An interruption (KeyboardInterrupt) ends the study: what was done is returned.

    Args:
        model: A loaded model that listens as Whisper does.
        audio: A file or a pattern, a list of these, or of (samples, rate).
        text: The transcript of one recording, or a list with that of each; None = what the model itself writes.
        report: Called after each recording.

    Returns:
        The findings: `corpus["of"]` is "recordings", so its texts are recordings and its tokens those of transcripts.

    Raises:
        AttnscopeError: The model hears nothing, or there is not one recording that can be read.
    """
    given = listed(audio, "recording")
    texts = [text] if isinstance(text, str) else [None] * len(given) if text is None else list(text)
    if len(texts) != len(given):
        n = f"{len(texts)} transcript{'s' * (len(texts) != 1)}"
        raise AttnscopeError(f"there are {len(given)} recordings and {n}", "give one for each, or leave out the text")
    done = _Done()
    complete = True
    try:
        for number, ((name, recording), written) in enumerate(zip(given, texts, strict=True), 1):
            done.add(model, name, recording, written)
            if report is not None:
                report(Progress(done.n_recordings, done.n_tokens, number / len(given)))
    except KeyboardInterrupt:
        if not done.n_recordings:
            raise
        complete = False
    if done.measures is None or done.uniform is None:
        raise AttnscopeError(
            f"no recording is left of {len(given)}: {told(done.problems[0])}", "give WAV files: --audio 'talks/*.wav'"
        )
    corpus = {
        "of": RECORDINGS,
        "sources": [name for name, _ in given],
        "n_texts": done.n_recordings,
        "n_tokens": done.n_tokens,
        "sha256": done.digest.hexdigest(),
        "shards": ["1/1"],
        "problems": done.problems,
        "complete": complete,
    }
    notes = list(dict.fromkeys(done.notes))
    if done.n_recordings == 1:
        notes.append("of one recording there are no intervals")
    from attnscope.core.sound_measures import SOUND_MEASURES

    sums = done.measures, done.uniform, done.layers
    heads = heads_of("cross", SOUND_MEASURES, *sums, resting=lambda measures: 1 - measures["sound"].value)
    return Findings(
        run_of(model.info, notes), corpus, described(SOUND_MEASURES), heads, sums_of("cross", SOUND_MEASURES, *sums)
    )


@dataclass
class _Done:
    """What was added up over recordings, (layer, head, measure); of uniform attention one head of one layer."""

    measures: RunningSums | None = None
    uniform: RunningSums | None = None
    layers: tuple[int, ...] = ()
    n_recordings: int = 0
    n_tokens: int = 0
    problems: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def add(self, model: Model, name: str, given: Any, text: str | None) -> None:
        """Runs the model on a recording, and adds its measures; or lists it where it cannot be read."""
        from attnscope.core.sound_measures import SoundFacts, SoundSums

        try:
            recording = read_recording(given)
        except AttnscopeError as error:
            self.problems.append({"source": name, "line": None, "reason": error.message.replace(f"{name} ", "", 1)})
            return
        reading = read(model, Speech(recording, text))
        sound = reading.sound
        if reading.target is None or sound is None:
            raise AttnscopeError(
                f"{model.info.name} has no decoder, so there is no cross-attention to measure",
                "look at single recordings with: attnscope heatmap --audio",
            )
        asks = ~reading.target.special
        if not asks.any():
            self.problems.append({"source": name, "line": None, "reason": "there is no token in what is written"})
            return
        probe = SoundSums(SoundFacts(asks, len(sound.envelope), sound.seconds_per_frame))
        run_probe(model, reading, only("cross", probe))
        wrong = [layer for layer, sums in probe.sums["cross"].items() if not np.isfinite(sums).all()]
        if wrong:
            reason = f"attention is not finite (NaN) in layer {wrong[0]} in {model.info.dtype}: not studied"
            self.problems.append({"source": name, "line": None, "reason": reason})
            return
        with undisturbed():
            self._take(probe, int(asks.sum()))
            self.notes += reading.notes
            self.digest.update(f"recording {len(recording.samples)}\n".encode() + recording.samples.tobytes())

    def _take(self, probe: Any, n_tokens: int) -> None:
        from attnscope.core.running import RunningSums
        from attnscope.studies.picture_heads import stacked

        by_layer = probe.sums["cross"]
        layers = tuple(sorted(by_layer))
        found = [stacked([by_layer[layer][part] for layer in layers]) for part in (0, 1)]
        even = [part.T[None, None] for part in probe.uniform]
        if self.measures is None or self.uniform is None:
            self.layers = layers
            self.measures, self.uniform = RunningSums(found[0].shape[1:]), RunningSums((1, *even[0].shape[2:]))
        self.measures.add(*found)
        self.uniform.add(*even)
        self.n_recordings += 1
        self.n_tokens += n_tokens
