"""Random checkpoints of any architecture, for tests and measurements."""
