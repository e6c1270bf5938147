"""One function draws every map of attention and one prints it, whatever was read; one function writes figures."""

import io

import numpy as np
import pytest

from attnscope.drawing.files import number_duplicates
from attnscope.questions import heatmap_figures as figures
from attnscope.questions import heatmap_terminal as terminal
from attnscope.questions.places import Picture, Sound
from attnscope.report.plain_text import open_console
from tests.record_helpers import map_of, record_of, simple, tokens_of
from tests.test_pooled_records import pooled_record


def picture():
    tokens = tokens_of(
        ["CLS", *(f"{row},{column}" for row in range(2) for column in range(3))], special=[0]
    )
    pixels = np.random.default_rng(1).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    return record_of(map_of(tokens), picture=Picture(pixels, (2, 3), "p.png", (12, 8)))


def sound(n=7):
    frames = tokens_of([f"{frame}" for frame in range(n)])
    heard = Sound(np.linspace(0, 1, n, dtype=np.float32), 0.02, 0.02 * n, 0.02 * n, "s.wav")
    return record_of(map_of(tokens_of(["a", "b"]), frames, kind="cross"), sound=heard)


RECORDS = {
    "text": lambda: simple(4),
    "pooled": pooled_record,
    "picture": picture,
    "sound": sound,
}


def printed(record, **how):
    file = io.StringIO()
    console = open_console(file=file, width=90)
    if (view := terminal.show(record, console, **how)) is not None:  # type: ignore[arg-type]
        console.print(view)
    return file.getvalue()


@pytest.mark.parametrize("kind", RECORDS)
def test_one_function_draws_every_kind_of_map(kind, tmp_path):
    record = RECORDS[kind]()
    paths = record.draw(tmp_path, ["svg", "png"])
    assert [path.suffix for path in paths[:4]] == [".svg", ".png"] * 2
    assert [path.stem.partition("-")[0] for path in paths[::2]] == ["overview", "L00", "L01"]
    assert figures.render_first_figure(record) == paths[1].read_bytes()
    assert record.draw(tmp_path / "none", []) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("kind", "said"), [("pooled", "no --query"), ("sound", "no --query"), ("text", "no token is")]
)
def test_a_query_that_names_nothing_is_refused_before_anything_is_written(kind, said, tmp_path):
    record = RECORDS[kind]()
    for ask in (lambda: figures.require_query(record, "zz"), lambda: record.draw(tmp_path, query="zz")):
        with pytest.raises(Exception, match=said):
            ask()
    assert not list(tmp_path.iterdir())
    figures.require_query(record, None)


@pytest.mark.parametrize("kind", RECORDS)
def test_nothing_is_printed_that_was_not_asked_for(kind):
    assert printed(RECORDS[kind](), draws_maps=False) == ""
    alone = printed(RECORDS["text"](), draws_maps=False, query="t1")
    assert "attends to" in alone
    assert "strongest links" not in alone


def test_files_of_one_name_are_told_apart():
    assert number_duplicates(["a", "b", "A", "a", "a-2"]) == ["a", "b", "A-2", "a-3", "a-2-2"]
