"""Scores of whole evaluation sets."""
