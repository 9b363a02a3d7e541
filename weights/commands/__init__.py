"""The commands of `python -m weights` that need no lab: checkpoints, corpora, the log of what was served."""
