"""A Hub that cannot be reached: a port behind which nobody answers."""

import re
import socket
import time

import pytest
from huggingface_hub import constants


@pytest.fixture(params=["refuses", "hangs"])
def dead_hub(request, monkeypatch):
    """A port behind which nobody answers: what the Hub's client slept between attempts, and what is to be said."""
    slept = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "hangs":
            server.listen()  # the system connects whoever comes, and nobody ever accepts
            monkeypatch.setattr("attnscope.models.catalog.HUB_TIMEOUT_S", 0.2)
        else:
            # It is not the clock that ends it.
            monkeypatch.setattr("attnscope.models.catalog.HUB_TIMEOUT_S", 60)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        sleep = time.sleep
        monkeypatch.setattr(
            "time.sleep", lambda seconds: slept.append(seconds) if seconds >= 0.5 else sleep(seconds)
        )
        yield (
            slept,
            "Connection refused" if request.param == "refuses" else "timed out|no answer within 0.2 s",
        )


@pytest.mark.parametrize(
    "command",
    [
        ["heatmap", "a text", "-m", "org/name"],
        ["learn", "cost", "org/name"],
    ],
    ids=["model", "config"],
)
def test_a_hub_that_cannot_be_reached_is_one_line_and_not_tried_again(command, dead_hub, run):
    slept, said = dead_hub
    status, out, err = run(*command)
    assert (status, out) in ((1, ""), (2, ""))
    why, hint = err.splitlines()
    assert why.startswith("error: ")
    assert re.search(said, why)
    assert hint.startswith("hint: ")
    assert not slept
