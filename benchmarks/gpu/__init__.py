"""Measurements of trainkit on a GPU: `make gpu`."""
