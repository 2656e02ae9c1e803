"""Recipes: what may stand in one, how it is read, edited and compared."""
