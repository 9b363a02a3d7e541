"""The nightly turn: joins what was served, trains on, judges, and publishes the new checkpoint or refuses it."""
