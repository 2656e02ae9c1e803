"""What trainkit does on a GPU: `make gpu`."""
