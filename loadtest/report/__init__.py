"""Stored runs as Markdown pages with plots."""
