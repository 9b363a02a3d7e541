"""Long forms of the reliability matrix: each module drives a real server process over HTTP and returns rows. Not for speed."""
