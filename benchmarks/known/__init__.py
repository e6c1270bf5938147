"""Known answers: attention heads whose rule is known, what tools say of them, and how right that is."""
