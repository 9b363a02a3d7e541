"""The log of what was served: `log.py` takes each ranking and never waits; its thread writes the parts that `parts.py` describes."""
