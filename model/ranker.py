"""The Phoenix ranker: hash embeddings to tokens, the trunk, and the heads. The plain definition, in any dtype, with gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.batch import Batch
from model.config import DWELL_HIDDEN_WIDTH, MAX_DWELL_SECONDS, ModelConfig
from model.layers import ranking_mask
from model.trunk import Trunk, Watch, declare_norm, normed, zeros


class Tables(nn.Module):
    """One embedding table per entity, `[vocab_size, D]`, fp32 or bf16. Row 0 is padding and always reads as zero."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.user = zeros(config.user_hashes.vocab_size, config.width)
        self.post = zeros(config.post_hashes.vocab_size, config.width)
        self.author = zeros(config.author_hashes.vocab_size, config.width)


def look_up(table: Tensor, rows: Tensor) -> Tensor:
    """The hash embeddings of one entity side by side, fp32 `[..., n·D]`, for rows `[..., n]`."""
    embedded = functional.embedding(rows, table).float()
    return torch.where(rows[..., None] == 0, 0.0, embedded).flatten(-2)


class TokenBuilder(nn.Module):
    """Turns users, history items and, if the model scores them, candidates into fp32 tokens of width D."""

    def __init__(self, config: ModelConfig, *, candidates: bool = True) -> None:
        super().__init__()
        self.config = config
        width = config.width
        entity = (config.post_hashes.count + config.author_hashes.count) * width
        self.user_projection = zeros(config.user_hashes.count * width, width)
        self.history_projection = zeros(entity + (3 if config.has_dwell else 2) * width, width)
        if candidates:
            self.candidate_projection = zeros(entity + (2 if config.has_post_age else 1) * width, width)
        self.action_projection = zeros(config.actions, width)
        self.surface_table = zeros(config.product_surfaces, width)
        if config.has_post_age:
            self.post_age_table = zeros(config.post_age_buckets, width)
        if config.has_dwell:
            self.dwell_input = zeros(1, DWELL_HIDDEN_WIDTH)
            self.dwell_output = zeros(DWELL_HIDDEN_WIDTH, width)

    def user(self, tables: Tables, rows: Tensor) -> Tensor:
        """`[..., n]` rows to `[..., D]`."""
        return look_up(tables.user, rows) @ self.user_projection

    def history(
        self, tables: Tables, post_rows: Tensor, author_rows: Tensor, actions: Tensor, surfaces: Tensor, dwell: Tensor
    ) -> Tensor:
        """Rows `[..., n]`, actions `[..., A]`, surfaces and dwell seconds `[...]` to `[..., D]`."""
        features = [look_up(tables.post, post_rows), look_up(tables.author, author_rows), self._actions(actions)]
        features.append(functional.embedding(surfaces, self.surface_table))
        if self.config.has_dwell:
            features.append(self._dwell(dwell))
        return torch.cat(features, -1) @ self.history_projection

    def context(self, tables: Tables, batch: Batch) -> tuple[Tensor, Tensor]:
        """Users and their history as tokens `[B, 1 + H, D]`, and which of them may be seen, bool `[B, 1 + H]`."""
        user = self.user(tables, batch.user_rows)[:, None]
        history = self.history(
            tables,
            batch.history_post_rows,
            batch.history_author_rows,
            batch.history_actions,
            batch.history_surfaces,
            batch.history_dwell_seconds,
        )
        valid = torch.cat((batch.user_rows[:, :1] != 0, batch.history_post_rows[:, :, 0] != 0), 1)
        return torch.cat((user, history), 1), valid

    def candidate(
        self, tables: Tables, post_rows: Tensor, author_rows: Tensor, surfaces: Tensor, ages: Tensor
    ) -> Tensor:
        """Rows `[..., n]`, surfaces and age buckets `[...]` to `[..., D]`."""
        features = [look_up(tables.post, post_rows), look_up(tables.author, author_rows)]
        features.append(functional.embedding(surfaces, self.surface_table))
        if self.config.has_post_age:
            features.append(functional.embedding(ages, self.post_age_table))
        return torch.cat(features, -1) @ self.candidate_projection

    def _actions(self, actions: Tensor) -> Tensor:
        """`(2a − 1) @ action_projection`, and 0 where no action is set."""
        signed = (2 * actions - 1) @ self.action_projection
        return torch.where((actions != 0).any(-1, keepdim=True), signed, 0.0)

    def _dwell(self, seconds: Tensor) -> Tensor:
        """`gelu(clip(seconds, 0, 30)/30 · in) · out`."""
        fraction = seconds.clamp(0, MAX_DWELL_SECONDS)[..., None] / MAX_DWELL_SECONDS
        return functional.gelu(fraction @ self.dwell_input, approximate="tanh") @ self.dwell_output


class Heads(nn.Module):
    """Final norm, then logits of the discrete actions and, where there are any, sigmoids of the continuous ones, in fp32."""

    norm: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        declare_norm(self, "norm", config)
        self.actions = zeros(config.width, config.actions)
        if config.continuous_actions:
            self.continuous = zeros(config.width, config.continuous_actions)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden `[..., D]` to logits `[..., A]` and continuous values in 0 … 1 `[..., Z]`."""
        final = normed(self, "norm", hidden, self.config).float()
        logits = final @ self.actions
        if not self.config.continuous_actions:
            return logits, logits.new_empty(*logits.shape[:-1], 0)
        return logits, torch.sigmoid(final @ self.continuous)


class Ranker(nn.Module):
    """The whole model. Its `state_dict` names and shapes are the checkpoint's tensors; all weights start at 0, as upstream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = Tables(config)
        self.tokens = TokenBuilder(config)
        self.trunk = Trunk(config)
        self.heads = Heads(config)

    def forward(
        self, batch: Batch, dtype: torch.dtype = torch.float32, watch: Watch | None = None
    ) -> tuple[Tensor, Tensor]:
        """Score every candidate of a padded batch with the dense mask; the trunk runs in `dtype`, and each layer calls `watch`.

        Returns logits fp32 `[B, C, A]` and continuous values fp32 `[B, C, Z]`; those of padded slots mean nothing.
        """
        hidden, valid = self.embed(batch)
        context = hidden.shape[1] - batch.candidate_post_rows.shape[1]
        hidden = self.trunk(hidden.to(dtype), batch.positions, self.mask(context, valid), watch)
        logits, continuous = self.heads(hidden[:, context:])
        return logits, continuous

    def mask(self, context: int, valid: Tensor) -> Tensor:
        """Which keys each row sees, bool `[B, T, T]`; the first `context` tokens are the context. `valid` as `embed` returns it."""
        bidirectional = self.config.context_attention == "bidirectional"
        candidates = valid.shape[1] - context
        return ranking_mask(context, candidates, bidirectional=bidirectional, device=valid.device) & valid[:, None, :]

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The token sequence fp32 `[B, T, D]` and which tokens may be seen as keys, bool `[B, T]`.

        A candidate is always a valid key: it sees itself, and no other row sees it.
        """
        context, valid = self.tokens.context(self.tables, batch)
        candidates = self.tokens.candidate(
            self.tables,
            batch.candidate_post_rows,
            batch.candidate_author_rows,
            batch.candidate_surfaces,
            batch.candidate_age_buckets,
        )
        own = torch.ones_like(batch.candidate_surfaces, dtype=torch.bool)
        return torch.cat((context, candidates), 1), torch.cat((valid, own), 1)
