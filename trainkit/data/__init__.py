"""What is learned from: readers, the packed local form, and the data sets that recipes name."""
