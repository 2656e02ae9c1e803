"""Packed stores: written once, checked by their hashes, read through memory maps."""
