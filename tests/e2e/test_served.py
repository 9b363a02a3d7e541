"""The log of what was served by real processes: no ranking differs from what the engine was given, and closed parts survive `kill -9`."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.columns import Vocabulary, Wishes
from app.replies import placement_of
from loadtest.generate.tensors import inference_of
from loadtest.generate.traffic import Traffic, TrafficSettings
from loadtest.server import DEMO, Server, example, serving, wait_until
from model.create import create_engine
from model.engine import Item
from tests.support.parts import bits, by_name, rankings_of
from weights.checkpoint import load_checkpoint
from weights.served import PARTS, ServedRanking, read_part

pytestmark = pytest.mark.slow
