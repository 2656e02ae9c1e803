"""trainkit: training for computer vision in which every run proves what it did."""

__version__ = "0.1.0"
