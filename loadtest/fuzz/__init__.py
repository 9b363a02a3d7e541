"""Fuzzing in process: millions of odd requests against the real application, none of which may be a fault of the server."""
