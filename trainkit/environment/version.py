"""The version of trainkit."""

__version__ = "0.1.0"
