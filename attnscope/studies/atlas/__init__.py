"""All heads with the texts behind them."""
