"""Checkpoints and corpora: their formats on disk, import, fetch; the log of what was served. The lab learns from logs and judges."""
