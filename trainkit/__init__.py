"""trainkit: training for computer vision with reproducible, fully tracked runs."""

__version__ = "0.1.0"
