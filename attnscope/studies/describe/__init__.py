"""Where each head looks, in one line fitted on half of the texts."""
