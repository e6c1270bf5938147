"""Records of all heads with the texts behind them."""
