"""How well a ranker predicts a later period of a log, against baselines and, in a world, against the optimum."""
