"""What each head writes into the residual stream."""
