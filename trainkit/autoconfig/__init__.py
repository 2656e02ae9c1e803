"""Recipes fitted to data."""
