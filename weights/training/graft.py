"""Puts the trunk of a Hugging Face decoder under the inputs and heads of a ranker."""

from __future__ import annotations

from dataclasses import replace

import torch

from model.config import ConfigError
from model.ranker import Ranker
from weights.checkpoint import Checkpoint
from weights.errors import CheckpointError
from weights.published.decoder import Decoder
from weights.training import initial


def graft(decoder: Decoder, onto: Checkpoint, seed: int) -> tuple[Ranker, bool]:
    """A ranker with the decoder's trunk and final norm, and whether its inputs and heads are those of `onto`.

    They are if the widths agree; otherwise they are drawn and must be trained. Raises CheckpointError if the decoder's tensors do not
    match its config, if some of its layers would not see a whole request, or if a ranker cannot have its trunk.
    """
    before = onto.manifest.config
    try:
        config = replace(before, **decoder.fields)
    except ConfigError as error:
        raise CheckpointError(f"{decoder.source} cannot be a ranker's trunk: {error}.") from error
    if decoder.window is not None and 2 + config.history_length > decoder.window:
        raise CheckpointError(
            f"{decoder.source} sees {decoder.window} tokens back in some layers, which is not implemented: a request of "
            f"{onto.path} has {2 + config.history_length}."
        )
    ranker = Ranker(config)
    given = config.width == before.width
    if given:
        known = ranker.state_dict().keys()
        state = {name: tensor for name, tensor in onto.ranker.state_dict().items() if name in known}
    else:
        initial.upstream(ranker, torch.Generator().manual_seed(seed))
        state = ranker.state_dict()
    for name, tensor in decoder.tensors().items():
        expected = tuple(ranker.get_parameter(name).shape)
        if tensor.shape != expected:
            raise CheckpointError(
                f"{decoder.source} has {name} as {list(tensor.shape)} (inputs first), where its config asks {list(expected)}."
            )
        state[name] = tensor
    ranker.load_state_dict(state)
    return ranker.requires_grad_(False).eval(), given
