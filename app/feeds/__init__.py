"""Logs of changes of posts that people run already, which every replica reads by itself."""
