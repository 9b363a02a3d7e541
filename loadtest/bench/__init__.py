"""`make bench`: the targets table, each figure a ratio of two sides that were timed in turns."""
