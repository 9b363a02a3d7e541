"""Several front processes around one engine process: who starts whom, and what they say to each other (docs/fronts.md)."""
