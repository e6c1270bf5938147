"""Studies of heads over a corpus: measures, roles, needles."""
