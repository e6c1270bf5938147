"""Records as one HTML file: every head to look at, compare and save, without a server or a network."""

from attnscope.pages.document import (
    PAGE_SCHEMA,
    Page,
    PageText,
    page_of,
    page_of_record,
    page_of_saved,
    require_room,
)

__all__ = [
    "PAGE_SCHEMA",
    "Page",
    "PageText",
    "page_of",
    "page_of_record",
    "page_of_saved",
    "require_room",
]
