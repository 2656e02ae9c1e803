"""Images with labels: the block, its split and what changes the images."""
