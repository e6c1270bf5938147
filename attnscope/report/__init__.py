"""What a result says, as blocks, and what draws them: the terminal, figures and HTML. Loads no torch."""
