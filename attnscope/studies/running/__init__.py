"""How a study runs: passes over a corpus, workers, memory, failures."""
