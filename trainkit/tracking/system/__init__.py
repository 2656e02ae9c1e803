"""What the machine does while a run goes on."""
