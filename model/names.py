"""The names that checkpoints give to parameters: `trunk.layers.0.query` for `trunk.layers.0.attention.query.weight`.

They are older than the modules that now hold the parameters, and every checkpoint in use has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_RULES = (
    (re.compile(r"\battention\."), ""),
    (re.compile(r"\bffn\."), "ffn_"),
    (re.compile(r"\.bias$"), "_bias"),
    (re.compile(r"\.(weight|scale)$"), ""),
)


def checkpoint_name(parameter: str) -> str:
    """The name in a checkpoint of a parameter of `Ranker`, `Towers` or one of their modules."""
    for pattern, replacement in _RULES:
        parameter = pattern.sub(replacement, parameter)
    return parameter


def checkpoint_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`module.named_parameters()` under the names of checkpoints, in the same order."""
    return ((checkpoint_name(name), parameter) for name, parameter in module.named_parameters())


def use_checkpoint_names(module: nn.Module) -> None:
    """Make `state_dict` and `load_state_dict` of a module, and of what contains it, use the names of checkpoints."""
    module.register_state_dict_post_hook(_rename_saved)
    module.register_load_state_dict_pre_hook(_rename_loaded)


def _rename_saved(module: nn.Module, state: dict[str, Tensor], prefix: str, _: Any) -> None:
    for name, _parameter in module.named_parameters():
        state[prefix + checkpoint_name(name)] = state.pop(prefix + name)


def _rename_loaded(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    for name, _parameter in module.named_parameters():
        if (key := prefix + checkpoint_name(name)) in state:
            state[prefix + name] = state.pop(key)
