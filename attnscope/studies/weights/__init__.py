"""What the weights of heads say without any text."""
