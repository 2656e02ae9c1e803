"""Data sets that recipes name: readers, the packed local form, splits."""
