"""People in several modalities: the block, its index and its sampler."""
