"""Read annotated texts: CoNLL-U, jsonl with character spans, Python source. Models and scores are left to `studies`."""

from attnscope.annotated.reading import AnnotatedCorpus
from attnscope.annotated.texts import AnnotatedText, Link

__all__ = ["AnnotatedCorpus", "AnnotatedText", "Link"]
