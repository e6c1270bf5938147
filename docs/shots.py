"""Draw the pictures of README and docs again: `python -m docs.shots [name …]`.

Figures of commands come from the command line, views of pages from Chromium by Playwright, as in the tests of pages.
ATTNSCOPE_DINOV2, ATTNSCOPE_WHISPER and ATTNSCOPE_SMOLLM2 name folders with DINOv2 small, Whisper tiny.en and
SmolLM2-135M. Figures of a model without a folder stay as they are.
"""

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from tests.page_helpers import Opened, open_browser

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"

TEXT = "The animal didn't cross the street because it was too tired."
CAPITAL = "The capital of France is"
LONG_WORDS = "Tokenizers mispronounce antidisestablishmentarianism."
STAR = ("--pick", "L3H1")
ALICE = ("--file", "sample_texts/alice.txt", "--split", "paragraph")
CAT = ("--image", "sample_texts/cat.jpg")
TRAINED = ("DINOV2", "WHISPER", "SMOLLM2")
SPEECH = ("--audio", "sample_texts/animal.wav", "--words")

FIGURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "overview.png": ("overview.png", ("heatmap", TEXT)),
    "L03H01.png": ("L03H01.png", ("heatmap", TEXT, "--pick", "L3H1", "--query", "it")),
    "mean.png": ("mean.png", ("heatmap", TEXT, "--mean", "heads")),
    "cls.png": ("query-000.png", ("heatmap", TEXT, "-L", "5", "--query", "[CLS]", "--hide-special")),
    "groups.png": ("shares.png", ("heatmap", TEXT, "--from", "it was", "--to", "the animal")),
    "pair.png": (
        "L03H01.png",
        ("heatmap", "Where is the cat?", "--pair", "The cat sat on the mat.", *STAR),
    ),
    "words.png": ("L00.png", ("heatmap", LONG_WORDS, "--words", "-L", "0")),
    "sinks.png": ("picked.png", ("heatmap", TEXT, "--pick", "L3H1,L4H5", "--without-sinks")),
    "log.png": ("L03H01.png", ("heatmap", TEXT, *STAR, "--colours", "log")),
    "rollout.png": ("overview.png", ("heatmap", TEXT, "--rollout")),
    "generate.png": ("L20.png", ("heatmap", CAPITAL, "-m", "SMOLLM2", "--generate", "8", "-L", "20")),
    "relevance.png": ("L29.png", ("heatmap", CAPITAL, "-m", "SMOLLM2", "--relevance", " Paris")),
    "relations.png": ("relations.png", ("relations", "sample_texts/dependencies.conllu", "-f", "png")),
    "change.png": ("change.png", ("compare", TEXT, "--with", TEXT.replace("tired", "wide"))),
    "ablate.png": (
        "effect-zero_l2.png",
        ("ablate", "--file", "sample_texts/sentences.txt", "-f", "png"),
    ),
    "patch.png": ("effect.png", ("patch", "sample_texts/pairs/agreement.jsonl", "-m", "SMOLLM2")),
    "column.png": ("L03H01.png", ("heatmap", TEXT, "--pick", "L3H1", "--width", "column")),
    "roles.png": ("roles.png", ("heads", *ALICE, "-f", "png")),
    "split.png": ("split.png", ("learn", "split", "--counts", "1,2,4", "-f", "png")),
    "cat-layer.jpg": ("L08-CLS.png", ("heatmap", *CAT, "-m", "DINOV2", "-L", "8")),
    "cat-patch.jpg": ("L08-6-5.png", ("heatmap", *CAT, "-m", "DINOV2", "-L", "8", "--query", "6,5")),
    "whisper.png": ("overview.png", ("heatmap", *SPEECH, "-m", "WHISPER")),
    "word-spectrogram.png": ("word-times.png", ("heatmap", *SPEECH, "-m", "WHISPER")),
    "explained.png": ("explained.png", ("heads", *ALICE, "-f", "png")),
    "weights-graph.png": ("weights-graph.png", ("weights", "-m", "SMOLLM2", "-f", "png")),
    "matrix.png": ("matrix.png", ("compare", *ALICE, "-f", "png")),
    "word-times.png": ("L02H01.png", ("heatmap", *SPEECH, "-m", "WHISPER", "--pick", "L2H1")),
}
"""Of each picture: the file that the command writes, and the command. A name of `TRAINED` stands for a folder."""

PAGE_VIEWS = ("#v=grid&h=3.1", "#v=matrix&h=3.1&q=10&k=2", "#v=text&h=3.1&q=10")
PAGE_SIZE_PX = (1100, 720)
SECONDS_PER_VIEW = 3


def main(names: Sequence[str] = ()) -> None:
    """Draw the named pictures again; without names, all of them."""
    for name, (file, command) in FIGURES.items():
        if not names or name in names:
            _draw_figure(name, file, command)
    if not names or "page.gif" in names:
        _draw_moving_page()
    if not names or "cat-page.jpg" in names:
        _draw_photo_page()


def _draw_figure(name: str, file: str, command: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if _run([*command, "-o", folder], name):
            _save(Image.open(Path(folder, file)).convert("RGB"), name)


def _save(picture: Image.Image, name: str) -> None:
    """Save a picture: photos as JPEG, drawings in 256 colours."""
    if name.endswith(".jpg"):
        picture.save(IMAGES / name, quality=85, optimize=True)
    else:
        # Colours that few pixels have, such as those of colour bars, stay apart.
        drawn = picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
        drawn.save(IMAGES / name, optimize=True)
    print(name)


def _run(command: Sequence[str], name: str) -> bool:
    """Run a command line; False = no folder of its model is named."""
    arguments = [
        os.environ.get(f"ATTNSCOPE_{word}", "") if word in TRAINED else word for word in command
    ]
    if "" in arguments:
        print(f"{name}: skipped, no folder of its model is named")
        return False
    subprocess.run([sys.executable, "-m", "attnscope", *arguments, "-q"], check=True, cwd=ROOT)
    return True


def _screenshots(page: Path, views: Sequence[str]) -> list[Image.Image]:
    """Return what a browser shows of a page, one picture for each address after its name."""
    width, height = PAGE_SIZE_PX
    pictures = []
    with open_browser() as browser:
        for view in views:
            opened = Opened(browser.new_page(viewport={"width": width, "height": height}), page)
            opened.page.goto(page.as_uri() + view)
            opened.page.reload()
            opened.page.wait_for_timeout(1500)
            pictures.append(Image.open(io.BytesIO(opened.page.screenshot())).convert("RGB"))
    return pictures


def _draw_moving_page() -> None:
    """Draw the moving picture at the top of README: three views of one page."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        _run(["page", TEXT, "-o", str(page)], "page.gif")
        frames = _screenshots(page, PAGE_VIEWS)
    # One palette for all frames keeps colours from flickering.
    width, height = PAGE_SIZE_PX
    whole = Image.new("RGB", (width, height * len(frames)))
    for number, frame in enumerate(frames):
        whole.paste(frame, (0, number * height))
    palette = whole.quantize(255, method=Image.Quantize.MAXCOVERAGE)
    first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    first.save(
        IMAGES / "page.gif",
        save_all=True,
        append_images=others,
        duration=1000 * SECONDS_PER_VIEW,
        loop=0,
    )
    print("page.gif")


def _draw_photo_page() -> None:
    """Draw the page of a photo, with one patch of the cat's eye chosen."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        if _run(["page", *CAT, "-m", "DINOV2", "-o", str(page)], "cat-page.jpg"):
            (picture,) = _screenshots(page, ["#v=photo&h=8.3&p=0,6,5&scale=head"])
            _save(picture, "cat-page.jpg")


if __name__ == "__main__":
    main(sys.argv[1:])
