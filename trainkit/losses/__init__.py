"""Losses, written from their formulas; each is tested against plain loops."""
