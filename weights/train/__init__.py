"""Training a ranker from a log of impressions, with the model code that serves. Draws no world and serves nothing."""
