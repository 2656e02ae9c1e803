"""Rows: the one form in which prepared data lie on disk, whatever they are."""
