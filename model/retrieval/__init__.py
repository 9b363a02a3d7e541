"""Retrieval: the two towers, the exact search through a corpus, and the engine that answers from both."""
