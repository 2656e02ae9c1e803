"""Runs compared, promoted and examined after training."""
