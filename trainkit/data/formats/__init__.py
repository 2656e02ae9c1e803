"""File formats of others, read without trust."""
