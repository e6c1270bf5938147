"""Progress where no terminal shows a bar."""

from attnscope.cli import progress as module
from attnscope.studies.inputs.texts import Progress


def test_a_line_a_minute_says_how_far_it_is(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with module.progress(quiet=False) as report:
        assert report is not None
        for minute in (0.5, 1.2, 1.4, 2.5):
            now = 60 * minute
            report(Progress(int(100 * minute), 1000, minute / 3, "reading examples"))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("/s ")[1] for line in lines] == [
        "(40%, about 2 min left)",
        "(83%, about 1 min left)",
    ]
    with module.progress(quiet=True) as report:
        assert report is None
