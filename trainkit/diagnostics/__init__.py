"""Measurements a person asks for: limits, preflight, waits and switches."""
