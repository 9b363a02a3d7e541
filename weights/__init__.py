"""Checkpoints on disk: manifest, load, import, verify, demo. Serves nothing."""
