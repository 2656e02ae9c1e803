"""Faces: the block, its split and alignment."""
