"""Import of the published checkpoints (JAX npz)."""
