"""Drawn data, and modalities derived from photographs."""
