"""What each head does over a corpus: measures, roles, needles."""
