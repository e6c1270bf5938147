"""Multi-head attention step by step."""
