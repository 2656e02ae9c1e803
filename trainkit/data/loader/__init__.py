"""Samples to batches: worker processes, decode threads and damaged samples."""
