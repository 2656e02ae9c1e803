"""Segmented images: the block, its splits and what checks them."""
