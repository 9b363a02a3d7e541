"""Stored runs as HTML pages and plots."""
