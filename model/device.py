"""What CUDA says when a device fails, and what is done then. None of this happens on a CPU."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from model.engine import EngineError

collecting = threading.RLock()
"""Held by a thread that collects garbage or records a CUDA graph: what a collection frees would break the recording."""

_given_up: set[str] = set()  # kinds of devices


def set_given_up(device: torch.device, is_given_up: bool) -> None:
    """Note whether every way of ranking on this kind of device failed its checks in this process: then nothing else is tried there."""
    (_given_up.add if is_given_up else _given_up.discard)(device.type)


def is_given_up(device: torch.device | str) -> bool:
    """What was noted last of this kind of device; False before."""
    return torch.device(device).type in _given_up


def is_lost(device: torch.device) -> bool:
    """Whether this is a CUDA device on which this process can do nothing more."""
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@contextmanager
def losses_of(device: torch.device) -> Iterator[None]:
    """Inside, an error after which only a new process can use the device becomes a sticky EngineError. Torch and Triton tell of it by
    different errors, so the device is asked."""
    try:
        yield
    except (EngineError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or is_lost(device):
            raise EngineError(f"the device failed: {error}", sticky=True) from error
        raise


def free_memory(device: torch.device) -> None:
    """Give back what nobody uses any more. A lost device has nothing to give back."""
    with collecting:
        gc.collect()  # weights are large, and cycles hold them
    if device.type == "cuda" and torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
