"""Collect all heads of a model with the texts behind them."""
