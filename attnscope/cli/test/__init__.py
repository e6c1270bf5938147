"""Commands that change the model and measure what that does."""
