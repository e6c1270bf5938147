"""Pictures and tables of rollouts."""
