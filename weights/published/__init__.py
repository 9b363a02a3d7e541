"""The published checkpoints (JAX npz) and how they become ours."""
