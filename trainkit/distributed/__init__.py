"""Processes and devices: what runs on each, and what ends them together."""
