"""Checkpoints: their format on disk, import of published ones, training of new ones."""
