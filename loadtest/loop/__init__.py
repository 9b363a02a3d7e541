"""Fourteen days of a synthetic world through the running service, with a nightly turn each night: does the loop follow what people like?"""

from __future__ import annotations
