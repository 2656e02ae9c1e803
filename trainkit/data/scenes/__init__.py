"""Segmented pictures: the block, its splits and what checks them."""
