"""Predictions of a trained run on new data."""
