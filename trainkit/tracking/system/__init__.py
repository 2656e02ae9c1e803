"""Load of the machine while a run goes on: processor, memory, disk, network, GPU."""
