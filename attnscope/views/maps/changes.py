"""What was done to attention weights after the model gave them, in words."""

from __future__ import annotations

from attnscope.records import Heatmap


def hidden_tokens(kind: str) -> str:
    """What `--hide-special` leaves out of a kind of attention; see `Tokens.sinks`."""
    return "special tokens and the first token" if kind == "decoder" else "special tokens"


def change_notes(record: Heatmap, kind: str) -> list[str]:
    """A note for each change of a record, as the maps of one kind of attention show it."""
    notes = {
        "hide_special": f"{hidden_tokens(kind)} are hidden; each row is divided by what is left of it "
        "(a row with less than 1% left is empty)",
        "words": "word pieces are merged: weights summed over keys, averaged over queries",
    }
    return [notes[change] for change in record.changes]
