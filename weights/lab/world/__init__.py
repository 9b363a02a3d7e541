"""A synthetic feed with stated probabilities, so that the best possible ranking is known. Not a model of any real service."""
