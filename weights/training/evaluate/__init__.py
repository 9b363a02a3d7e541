"""How well a ranker predicts a later part of a log, against baselines and, in a world, against the best possible. Trains nothing."""
