"""Corpora: the posts that retrieval searches, as unit vectors of one encoder, on disk."""
