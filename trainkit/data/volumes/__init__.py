"""Volumes: the block, its splits and what changes the voxels."""
