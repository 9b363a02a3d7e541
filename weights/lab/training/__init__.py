"""From a log of impressions to a checkpoint: examples, training, evaluation, the demo and its world."""
