"""Checkpoints: written beside the training, verified, and read without unpickling."""
