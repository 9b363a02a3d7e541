"""Bytes ↔ columns: pure functions from a body to features and from scores to a reply. Knows no HTTP and no torch."""
