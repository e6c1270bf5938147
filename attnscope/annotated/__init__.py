"""Annotated texts on their way in: CoNLL-U, jsonl with character spans, Python source."""

from attnscope.annotated.reading import AnnotatedCorpus
from attnscope.annotated.texts import AnnotatedText, Link

__all__ = ["AnnotatedCorpus", "AnnotatedText", "Link"]
