"""What each candidate attends to, from the plain definition in fp32. For people who ask why, never for serving."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.batch import collate
from model.config import CandidatePositions
from model.inputs import Candidates, Context
from model.layers import attention_weights
from model.ranker import Ranker
from model.trunk import Seen


@torch.inference_mode()
def candidate_attention(
    ranker: Ranker, context: Context, candidates: Candidates, positions: CandidatePositions = "shared"
) -> NDArray[np.float32]:
    """Attention weights of the candidates' rows by layer and head, `[L, N, C, 1 + h + 1]`: on the user, on each event of the history
    and on the candidate itself. Rows sum to 1; padding gets 0. One layer's weights are held at a time."""
    config, device = ranker.config, ranker.heads.norm.device
    batch = collate([(context, candidates)], config, positions).to(device)
    length = 1 + len(context)
    rows: list[NDArray[np.float32]] = []

    def watch(seen: Seen) -> None:
        query = seen.query[:, length:]
        multiplier, cap, form = config.attention_multiplier, config.attention_cap, config.cap_form
        weights = attention_weights(query, seen.key, mask, multiplier, cap, form)[0]
        itself = weights[:, :, length:].diagonal(dim1=1, dim2=2)[..., None]
        rows.append(torch.cat((weights[:, :, :length], itself), -1).cpu().numpy())

    _, valid = ranker.embed(batch)
    mask: Tensor = ranker.mask(length, valid)[:, length:]
    ranker(batch, watch=watch)
    return np.stack(rows)
