"""What a run's time went into."""
