"""Annotated texts on their way in: CoNLL-U, jsonl with character spans, Python source."""

from attnscope.annotated.reading import KINDS, UNITS, AnnotatedCorpus
from attnscope.annotated.texts import AnnotatedText, Link

__all__ = ["KINDS", "UNITS", "AnnotatedCorpus", "AnnotatedText", "Link"]
