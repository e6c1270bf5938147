"""The moving picture at the top of README, three views of one page: `python -m docs.shots`.

It needs Chromium and Playwright, as the tests of pages do.
"""

import io
from pathlib import Path

from PIL import Image

import attnscope
from tests.page_helpers import Opened, open_browser

TEXT = "The animal didn't cross the street because it was too tired."
VIEWS = ("#v=grid&h=3.1", "#v=matrix&h=3.1&q=10&k=2", "#v=text&h=3.1&q=10")
SIZE, SECONDS = (1100, 720), 3
PATH = Path(__file__).resolve().parent / "images" / "page.gif"


def shoot(folder: Path) -> list[Image.Image]:
    """The views of a page of one sentence, as they look in a browser."""
    page = attnscope.page(attnscope.load("minilm"), [TEXT])
    path = page.save(folder / "page.html")
    frames = []
    with open_browser() as browser:
        for view in VIEWS:
            opened = Opened(browser.new_page(viewport=dict(zip(("width", "height"), SIZE, strict=True))), path)
            opened.page.goto(path.as_uri() + view)
            opened.page.reload()
            opened.page.wait_for_timeout(1500)
            frames.append(Image.open(io.BytesIO(opened.page.screenshot())).convert("RGB"))
    return frames


def main() -> None:
    """Writes the picture."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        frames = shoot(Path(folder))
    whole = Image.new("RGB", (SIZE[0], SIZE[1] * len(frames)))
    for number, frame in enumerate(frames):
        whole.paste(frame, (0, number * SIZE[1]))
    palette = whole.quantize(255, method=Image.Quantize.MAXCOVERAGE)
    few = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    few[0].save(PATH, save_all=True, append_images=few[1:], duration=1000 * SECONDS, loop=0)


if __name__ == "__main__":
    main()
