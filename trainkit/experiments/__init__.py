"""Runs: one, or several that belong together, and what follows from one."""
