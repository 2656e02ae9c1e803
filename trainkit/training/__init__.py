"""Train: the loop, its guards and its state."""
