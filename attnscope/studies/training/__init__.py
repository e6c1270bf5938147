"""Follow heads over the checkpoints of a training run."""
