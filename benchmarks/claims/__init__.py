"""The claims ledger: what guides to faster training promise, measured on this machine."""
