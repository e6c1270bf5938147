"""Known answers: attention heads whose rule is known, what attnscope says of them, and how right that is."""
