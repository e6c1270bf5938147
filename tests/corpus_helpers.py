"""Corpora in files, and a tokenizer of letters, for tests of what is read and how it is batched."""

from pathlib import Path

from attnscope.text import build_tokens

CLS, SEP = 1, 2


def encode(text: str):
    """[CLS], one token a character, [SEP]; numbers by the letter's code, and by a code of its own after a space."""
    ids = [CLS, *(3 + ord(char) % 1000 for char in text), SEP]
    ends = [True, *[False] * len(text), True]
    return build_tokens(
        text, ids=ids, pieces=[f"t{i}" for i in ids], offsets=None, special=ends, segments=[0] * len(ids)
    )


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
