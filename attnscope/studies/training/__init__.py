"""How heads change over the checkpoints of a training run."""
