"""From samples to conclusions: runs, percentiles, the search for a capacity, comparisons of two sides."""
