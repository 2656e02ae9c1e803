"""Runs on disk and in MLflow: the journal, its upload and the store."""
