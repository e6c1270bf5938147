"""Which texts are copies of another: equal but for case and whitespace. Copies are one piece of evidence, not many."""

import hashlib


def copy_key(text: str) -> bytes:
    """What copies of a text share: a hash of it with case folded and each run of whitespace as one space, 16 bytes."""
    folded = " ".join(text.casefold().split())
    return hashlib.blake2b(folded.encode("utf-8", "surrogatepass"), digest_size=16).digest()
