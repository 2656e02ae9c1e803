"""Run recipes: a single run, and groups of runs such as folds, seeds and sweeps."""
