"""Record and check what a run is started by: process, versions, host."""
