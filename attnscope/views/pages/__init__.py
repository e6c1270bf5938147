"""Records in notebooks, and a batch as a page of thumbnails."""
