"""Verbs of the command line, a file for what is done together. Heavy imports wait for a verb to be called."""
