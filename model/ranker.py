"""The Phoenix ranker as a plain PyTorch module, in any dtype, with gradients: hash embeddings to tokens, the trunk, and the heads.
Every engine is tested against it.

`PhoenixModel` of the published code is `Ranker` here; `block_user_reduce`, `block_history_reduce`, `block_candidate_reduce` and
`build_inputs` have their names. Its `proj_mat_1`, `_2`, `_3` project users, candidates and history, and its `unembeddings` are the heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.batch import Batch
from model.config import DWELL_HIDDEN_WIDTH, MAX_DWELL_SECONDS, ModelConfig
from model.engine import EngineError
from model.layers import Linear, dtype_name, make_recsys_attn_mask, zeros
from model.names import use_checkpoint_names
from model.trunk import Transformer, make_norm


class EmbeddingTables(nn.Module):
    """One embedding table per entity, `[vocab_size, D]`, all fp32 or all bf16. Row 0 is padding and always reads as zero."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.user = zeros(config.user_hashes.vocab_size, config.width)
        self.post = zeros(config.post_hashes.vocab_size, config.width)
        self.author = zeros(config.author_hashes.vocab_size, config.width)

    def dtype(self) -> torch.dtype:
        """The one dtype of all tables. Raises EngineError unless all are float32 or all bfloat16."""
        found = [table.dtype for table in (self.user, self.post, self.author)]
        if len(set(found)) > 1 or found[0] not in (torch.float32, torch.bfloat16):
            dtypes = ", ".join(dtype_name(dtype) for dtype in found)
            raise EngineError(f"embedding tables must all be float32 or all bfloat16, got {dtypes}")
        return found[0]


def look_up(table: Tensor, rows: Tensor) -> Tensor:
    """The hash embeddings of one entity side by side, fp32 `[..., n·D]`, for rows `[..., n]`."""
    embedded = functional.embedding(rows, table).float()
    return torch.where(rows[..., None] == 0, 0.0, embedded).flatten(-2)


def history_features(config: ModelConfig) -> dict[str, int]:
    """The features of a history item, in the order of their rows in `history_projection`, each with its number of rows."""
    features = _entities(config) | {"actions": config.width, "surface": config.width}
    return features | ({"dwell": config.width} if config.has_dwell else {}) | _codes(config)


def candidate_features(config: ModelConfig) -> dict[str, int]:
    """The features of a candidate, in the order of their rows in `candidate_projection`, each with its number of rows."""
    features = _entities(config) | {"surface": config.width}
    return features | ({"post_age": config.width} if config.has_post_age else {}) | _codes(config)


def _entities(config: ModelConfig) -> dict[str, int]:
    return {"post": config.post_hashes.count * config.width, "author": config.author_hashes.count * config.width}


def _codes(config: ModelConfig) -> dict[str, int]:
    return {"codes": config.width} if config.token_levels else {}


def code_embeddings(codes: Tensor, table: Tensor, config: ModelConfig) -> Tensor:
    """The sum of one embedding a level, `[..., D]`, for codes int64 `[..., L]` and a table `[L · V, D]`, with L and V the model's
    `token_levels` and `token_values`. Code 0 adds nothing."""
    firsts = torch.arange(config.token_levels, device=codes.device) * config.token_values
    embedded = functional.embedding((codes + firsts - 1).clamp_min(0), table)
    return torch.where(codes[..., None] == 0, 0.0, embedded).sum(-2)


def by_feature(projection: Tensor, features: Mapping[str, int]) -> dict[str, Tensor]:
    """Each feature's own rows of a projection, as views."""
    return dict(zip(features, projection.split(list(features.values())), strict=True))


class TokenBuilder(nn.Module):
    """Turns users, history items and, if the model scores them, candidates into fp32 tokens of width D."""

    def __init__(self, config: ModelConfig, *, candidates: bool = True) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.user_projection = zeros(config.user_hashes.count * width, width)
        self.history_projection = zeros(sum(history_features(config).values()), width)
        if candidates:
            self.candidate_projection = zeros(sum(candidate_features(config).values()), width)
        self.action_projection = zeros(config.actions, width)
        self.surface_table = zeros(config.product_surfaces, width)
        if config.has_post_age:
            self.post_age_table = zeros(config.post_age_buckets, width)
        if config.has_dwell:
            self.dwell_input = zeros(1, DWELL_HIDDEN_WIDTH)
            self.dwell_output = zeros(DWELL_HIDDEN_WIDTH, width)
        if config.token_levels:
            self.code_table = zeros(config.code_rows, width)

    def block_user_reduce(self, tables: EmbeddingTables, batch: Batch) -> Tensor:
        """User tokens `[B, 1, D]`."""
        return look_up(tables.user, batch.user_rows)[:, None] @ self.user_projection

    def block_history_reduce(self, tables: EmbeddingTables, batch: Batch) -> Tensor:
        """Tokens of history items `[B, H, D]`."""
        features = {
            "post": look_up(tables.post, batch.history_post_rows),
            "author": look_up(tables.author, batch.history_author_rows),
            "actions": self._action_embeddings(batch.history_actions),
            "surface": functional.embedding(batch.history_surfaces, self.surface_table),
        }
        if self.config.has_dwell:
            features["dwell"] = self._dwell_embeddings(batch.history_dwell_seconds)
        if self.config.token_levels:
            features["codes"] = code_embeddings(batch.history_codes, self.code_table, self.config)
        return torch.cat([features[name] for name in history_features(self.config)], -1) @ self.history_projection

    def block_candidate_reduce(self, tables: EmbeddingTables, batch: Batch) -> Tensor:
        """Tokens of candidates `[B, C, D]`."""
        features = {
            "post": look_up(tables.post, batch.candidate_post_rows),
            "author": look_up(tables.author, batch.candidate_author_rows),
            "surface": functional.embedding(batch.candidate_surfaces, self.surface_table),
        }
        if self.config.has_post_age:
            features["post_age"] = functional.embedding(batch.candidate_age_buckets, self.post_age_table)
        if self.config.token_levels:
            features["codes"] = code_embeddings(batch.candidate_codes, self.code_table, self.config)
        return torch.cat([features[name] for name in candidate_features(self.config)], -1) @ self.candidate_projection

    def context(self, tables: EmbeddingTables, batch: Batch) -> tuple[Tensor, Tensor]:
        """Users and their history as tokens `[B, 1 + H, D]`, and which of them may be seen, bool `[B, 1 + H]`."""
        tokens = (self.block_user_reduce(tables, batch), self.block_history_reduce(tables, batch))
        valid = torch.cat((batch.user_rows[:, :1] != 0, batch.history_post_rows[:, :, 0] != 0), 1)
        return torch.cat(tokens, 1), valid

    def _action_embeddings(self, actions: Tensor) -> Tensor:
        """`(2a − 1) @ action_projection`, and 0 where no action is set."""
        signed = (2 * actions - 1) @ self.action_projection
        return torch.where((actions != 0).any(-1, keepdim=True), signed, 0.0)

    def _dwell_embeddings(self, seconds: Tensor) -> Tensor:
        """`gelu(clip(seconds, 0, 30)/30 · in) · out`."""
        fraction = seconds.clamp(0, MAX_DWELL_SECONDS)[..., None] / MAX_DWELL_SECONDS
        return functional.gelu(fraction @ self.dwell_input, approximate="tanh") @ self.dwell_output


class Heads(nn.Module):
    """Final norm, then logits of the discrete actions and, if there are any, sigmoids of the continuous ones, in fp32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = make_norm(config)
        self.actions = Linear(config.width, config.actions)
        self.continuous = Linear(config.width, config.continuous_actions) if config.continuous_actions else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden `[..., D]` to logits `[..., A]` and continuous values in 0 … 1 `[..., Z]`."""
        final = self.norm(hidden).float()
        logits = self.actions(final)
        if self.continuous is None:
            return logits, logits.new_empty(*logits.shape[:-1], 0)
        return logits, torch.sigmoid(self.continuous(final))


class Ranker(nn.Module):
    """The whole model. Its `state_dict` names and shapes are the checkpoint's tensors; all weights start at 0, as in the published code."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = EmbeddingTables(config)
        self.tokens = TokenBuilder(config)
        self.trunk = Transformer(config)
        self.heads = Heads(config)
        use_checkpoint_names(self)

    def forward(self, batch: Batch, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Score every candidate of a padded batch with the dense mask; the trunk runs in `dtype`.

        Returns logits fp32 `[B, C, A]` and continuous values fp32 `[B, C, Z]`; those of padded slots mean nothing.
        """
        hidden, mask, candidate_start_offset = self.build_inputs(batch)
        hidden = self.trunk(hidden.to(dtype), batch.positions, mask)
        logits, continuous = self.heads(hidden[:, candidate_start_offset:])
        return logits, continuous

    def build_inputs(self, batch: Batch) -> tuple[Tensor, Tensor, int]:
        """The token sequence `[user][history][candidates]`, fp32 `[B, T, D]`; which keys each row sees, bool `[B, T, T]`; and where the
        candidates begin. Padding is seen by nobody, but a candidate always sees itself.
        """
        context, valid = self.tokens.context(self.tables, batch)
        hidden = torch.cat((context, self.tokens.block_candidate_reduce(self.tables, batch)), 1)
        seq_len, candidate_start_offset = hidden.shape[1], context.shape[1]
        bidirectional = self.config.context_attention == "bidirectional"
        mask = make_recsys_attn_mask(seq_len, candidate_start_offset, bidirectional=bidirectional, device=hidden.device)
        valid = functional.pad(valid, (0, seq_len - candidate_start_offset), value=True)
        return hidden, mask & valid[:, None, :], candidate_start_offset
