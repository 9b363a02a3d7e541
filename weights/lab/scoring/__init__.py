"""Scores of a whole log, offline: the history rule of training, the engine of serving."""
