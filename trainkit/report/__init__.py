"""What is shown of a run: figures and tables."""
