"""One row in, tokens and targets out."""
