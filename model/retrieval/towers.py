"""The two towers of retrieval: a user and a post as unit vectors whose product is the score. The plain definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from model.batch import Batch, collate, hash_rows
from model.config import RetrievalConfig
from model.inputs import NO_CANDIDATES, NO_CODES, Context, Ids, Int64s, codes_fitting
from model.layers import make_recsys_attn_mask, zeros
from model.names import use_checkpoint_names
from model.ranker import EmbeddingTables, TokenBuilder, code_embeddings, look_up
from model.trunk import Transformer

SMALLEST_SQUARE = 1e-12
"""Lower bound of a squared norm, so that the vector of an empty context is zero instead of NaN."""


def unit(vectors: Tensor) -> Tensor:
    """`x / sqrt(max(Σx², 1e-12))` over the last axis, in fp32."""
    wide = vectors.float()
    return wide / wide.square().sum(-1, keepdim=True).clamp_min(SMALLEST_SQUARE).sqrt()


class CandidateTower(nn.Module):
    """`silu(x · input) · output` of a post's embeddings side by side: its hash embeddings, its author's, and that of its codes."""

    def __init__(self, config: RetrievalConfig) -> None:
        super().__init__()
        embeddings = config.post_hashes.count + config.author_hashes.count + bool(config.code_levels)
        self.input = zeros(embeddings * config.width, 2 * config.width)
        self.output = zeros(2 * config.width, config.width)

    def forward(self, embeddings: Tensor) -> Tensor:
        """fp32 `[..., n·D]` to `[..., D]`, not yet of unit length."""
        return functional.silu(embeddings @ self.input) @ self.output


class Towers(nn.Module):
    """The whole retrieval model. Its `state_dict` names and shapes are the checkpoint's tensors; all weights start at 0."""

    def __init__(self, config: RetrievalConfig) -> None:
        super().__init__()
        self.config = config
        self.tables = EmbeddingTables(config)
        self.tokens = TokenBuilder(config, candidates=False)
        self.trunk = Transformer(config)
        if config.linear_projection:
            self.candidate = CandidateTower(config)
        use_checkpoint_names(self)

    def users(self, batch: Batch, dtype: torch.dtype = torch.float32) -> Tensor:
        """Unit vectors fp32 `[B, D]`: the mean over the valid tokens of `[user][history]` after the trunk in `dtype`.

        The candidates of the batch are not read. A context without any valid token is the zero vector.
        """
        hidden, valid = self.tokens.context(self.tables, batch)
        context = hidden.shape[1]
        mask = make_recsys_attn_mask(context, context, device=hidden.device) & valid[:, None, :]
        hidden = self.trunk(hidden.to(dtype), batch.positions[:, :context], mask).float()
        total = torch.where(valid[..., None], hidden, 0.0).sum(1)
        return unit(total / valid.sum(1, keepdim=True).clamp_min(1))

    def posts(self, post_rows: Tensor, author_rows: Tensor, codes: Tensor) -> Tensor:
        """Unit vectors `[..., D]` in the tables' dtype, for rows `[..., n]` and codes `[..., Q]`. Post 0 by author 0 without codes is the
        zero vector."""
        parts = [look_up(self.tables.post, post_rows), look_up(self.tables.author, author_rows)]
        if self.config.code_levels:
            parts.append(code_embeddings(codes, self.tokens.code_table, self.config))
        embeddings = torch.cat(parts, -1)
        if not self.config.linear_projection:
            return unit(embeddings.unflatten(-1, (-1, self.config.width)).mean(-2)).to(self.tables.post.dtype)
        return unit(self.candidate(embeddings)).to(self.tables.post.dtype)

    @torch.inference_mode()
    def encode_users(self, contexts: Sequence[Context], dtype: torch.dtype = torch.float32) -> Tensor:
        """`users` for contexts that are not hashed yet."""
        batch = collate([(context, NO_CANDIDATES) for context in contexts], self.config)
        return self.users(batch.to(self.tokens.user_projection.device), dtype)

    @torch.inference_mode()
    def encode_posts(self, post_ids: Ids, author_ids: Ids, codes: Int64s = NO_CODES) -> Tensor:
        """`posts` for ids `[n]`, in fp32. `codes`: int64 `[n, q]`, see `codes_fitting`; `[0, 0]` if no post has any."""
        config, device = self.config, self.tokens.user_projection.device
        rows = (hash_rows(post_ids, config.post_hashes), hash_rows(author_ids, config.author_hashes))
        fitting = codes_fitting(codes, len(post_ids), config)
        return self.posts(*(torch.from_numpy(values).to(device) for values in (*rows, fitting))).float()
