"""The join: what was served, with what people did, becomes a log to train on."""
