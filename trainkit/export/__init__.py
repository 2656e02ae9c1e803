"""A trained run as files for others."""
