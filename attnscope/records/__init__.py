"""Frozen results: what was measured, on what, by what. NumPy only; they load and draw without torch."""

from attnscope.records.maps import HEATMAP_SCHEMA, AttentionMap, Heatmap, Tokens, load, spans
from attnscope.records.storage import write_whole

__all__ = ["HEATMAP_SCHEMA", "AttentionMap", "Heatmap", "Tokens", "load", "spans", "write_whole"]
