"""Trains the two retrieval towers on a log: posts that a user liked, against those that others in the batch liked or ignored.

The loss is a softmax over the posts of the batch. A popular post is a negative more often than others, so the logarithm of its share is
subtracted from its logit (the log-Q correction of sampled softmax: Bengio and Senécal 2008, Yi et al. 2019). Without it the towers learn
to avoid popular posts. Where most posts are new when they are ranked, the share is that of the post's author.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from model.batch import collate, hash_rows
from model.config import ModelConfig, RetrievalConfig
from model.inputs import NO_CANDIDATES
from model.names import checkpoint_parameters
from model.retrieval.towers import Towers
from weights.actions import default_score_weights, weight_vector
from weights.lab.training import initial
from weights.lab.training.choices import MOSTLY_HIDDEN, Plan, new_shares
from weights.lab.training.examples import Examples, hide
from weights.lab.training.log import Log
from weights.lab.training.run import reproducible
from weights.lab.training.settings import COUNT, FACTOR, NORM, RATE, SEED, SHARE, THREADS, WEIGHT, check_fields
from weights.lab.training.trainer import rate_at
from weights.tables import TableError


@dataclass(frozen=True, slots=True)
class TowerSettings:
    """Equal settings and logs give equal towers, to the last bit, on one machine and build.

    Raises ValueError for a value that a field may not have; the message names the field.
    """

    seed: Annotated[int, SEED] = 1
    steps: Annotated[int, COUNT] = 450
    batch_requests: Annotated[int, COUNT] = 96
    learning_rate: Annotated[float, RATE] = 3e-3
    warmup_steps: Annotated[int, COUNT] = 100
    weight_decay: Annotated[float, WEIGHT] = 0.01
    gradient_norm: Annotated[float, NORM] = 1.0
    temperature: Annotated[float, FACTOR] = 0.07
    # users shown without id, so the towers learn to use the history of unknown users
    hidden_user_share: Annotated[float, SHARE] = 0.3
    hidden_post_share: Annotated[float, SHARE] = 0.85  # posts shown under an id never seen, as most are when served
    # whose share corrects a post's logit, and whose posts are no negatives of its own
    negatives_by: Literal["author", "post"] = "author"
    threads: Annotated[int, THREADS] = 1

    def __post_init__(self) -> None:
        check_fields(self)


FEWEST_HIDDEN_USERS = 0.3
LIKED_PASSES, STEPS = 5.5, (150, 2000)
"""Passes over the requests with a liked post, and the fewest and most steps that this may be."""


def tower_settings(log: Log, plan: Plan) -> TowerSettings:
    """Decide how the towers learn from what `plan` saw in the log: hidden ids as the ranker's, whose share corrects, how many steps."""
    training = log.before(plan.until_ts)
    worth = training.actions @ weight_vector(plan.score_weights, log.action_names)
    liked = len(np.unique(training.request_id[worth > 0]))
    hidden = plan.settings.hidden_post_share
    settings = TowerSettings(
        seed=plan.settings.seed,
        hidden_user_share=max(FEWEST_HIDDEN_USERS, plan.settings.hidden_user_share),
        hidden_post_share=hidden,
        negatives_by="author" if new_shares(training)["post"] >= MOSTLY_HIDDEN else "post",
    )
    steps = int(np.clip(LIKED_PASSES * liked / settings.batch_requests, *STEPS))
    return replace(settings, steps=steps, warmup_steps=min(settings.warmup_steps, max(1, steps // 4)))


def towers_config(ranker: ModelConfig) -> RetrievalConfig:
    """Configuration of the towers for a ranker: the same sizes, actions and window."""
    features = {"has_dwell": False, "has_post_age": False, "continuous_actions": 0, "history_counts": False}
    return RetrievalConfig.from_dict(ranker.to_dict() | features)


class Pairs:
    """The requests of a log in which the user liked something, and the liked and ignored rows.

    `worth`: the weighted actions of each row; `requests`: those with a row of positive worth; `left`: rows without any action.
    `key`: the post or the author of each row, and the post where the author is unknown; `log_share` float32 `[n]`: the
    logarithm of how often a batch's post has that key.
    """

    def __init__(self, examples: Examples, weights: Mapping[str, float], key: Literal["author", "post"]) -> None:
        log = examples.log
        self.examples = examples
        self.worth = log.actions @ weight_vector(weights, log.action_names)
        is_by_author = (log.author_id != 0) & (key == "author")
        self.key: NDArray[np.uint64] = np.where(is_by_author, log.author_id, log.post_id)
        request = examples.request_of_rows
        liked, passed = self.worth > 0, ~log.actions.any(1)
        if log.unknown is not None:  # an action that nobody knows of may have been taken
            passed &= ~log.unknown.any(1)
        self.requests, self.left = np.unique(request[liked]), np.flatnonzero(passed)
        keys, of_row = np.unique(self.key, return_inverse=True)
        drawn = [np.bincount(of_row[rows], minlength=len(keys)) / rows.sum() for rows in (liked, passed) if rows.any()]
        self.log_share = np.log(np.maximum(sum(drawn) / len(drawn), 1e-6)).astype(np.float32)[of_row]

    def draw(self, count: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw requests `[count]` and rows: a liked row of each request, then as many rows that any user passed over, if there are any."""
        requests, liked = rng.choice(self.requests, count), []
        for request in requests:
            rows = self.examples.rows(request)
            worth = np.maximum(self.worth[rows], 0)
            liked.append(rng.choice(rows, p=worth / worth.sum()))
        return requests, np.concatenate((liked, rng.choice(self.left, count))) if len(self.left) else np.array(liked)


def train_towers(
    log: Log,
    config: RetrievalConfig,
    settings: TowerSettings,
    *,
    until_ts: int | None,
    weights: Mapping[str, float] | None = None,
    report: Callable[[int, int, float], None] = lambda step, steps, loss: None,
) -> Towers:
    """Train on the requests before `until_ts`, or on all. `weights` of actions: a row whose sum is above 0 was liked; None: X's weights.

    `report` is called with steps done, total steps and the loss. Raises TableError if no post was liked.
    """
    scored = default_score_weights(log.action_names) if weights is None else weights
    pairs = Pairs(Examples(log.before(until_ts), config), scored, settings.negatives_by)
    if not len(pairs.requests):
        raise TableError(
            "the training period holds no post with an action of positive weight: there is nothing to learn"
        )
    with reproducible(settings.threads):
        towers = initial_towers(config, torch.Generator().manual_seed(settings.seed))
        optimizer = torch.optim.AdamW(
            towers.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=settings.weight_decay
        )
        for step in range(settings.steps):
            rate = rate_at(step, settings.learning_rate, settings.warmup_steps, settings.steps)
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            loss = batch_loss(towers, pairs, settings, np.random.default_rng((settings.seed, step)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(towers.parameters(), settings.gradient_norm)
            optimizer.step()
            report(step + 1, settings.steps, loss.item())
    return towers.requires_grad_(False).eval()


def initial_towers(config: RetrievalConfig, generator: torch.Generator) -> Towers:
    """Towers with weights that keep their inputs' scale, norm scales of 1, biases of 0 and small embeddings.

    Those of content codes are large: beside the embeddings of hidden posts, which are noise, small ones would not be learned.
    """
    towers = Towers(config)
    with torch.no_grad():
        for name, parameter in checkpoint_parameters(towers):
            if parameter.ndim == 1:
                parameter.fill_(0 if name.endswith("_bias") else 1)
            elif name.endswith("code_table"):
                initial.draw(parameter, initial.code_deviation(config), generator)
            else:
                spread = 0.1 if name.startswith("tables.") or name.endswith("_table") else parameter.shape[0] ** -0.5
                initial.draw(parameter, spread, generator)
    return towers


def batch_loss(towers: Towers, pairs: Pairs, settings: TowerSettings, rng: np.random.Generator) -> Tensor:
    """The mean cross-entropy of each request's liked post among all posts of the batch.

    Posts with the same key (author or post) are no negatives.
    """
    requests, rows = pairs.draw(settings.batch_requests, rng)
    examples, log, config = pairs.examples, pairs.examples.log, towers.config
    contexts = [examples.context(int(request)) for request in requests]
    are_users_shown = rng.random(len(contexts)) >= settings.hidden_user_share
    contexts = [
        replace(
            context,
            user_id=context.user_id if keep or not len(context) else 0,
            post_ids=hide(context.post_ids, rng, settings.hidden_post_share),
        )
        for context, keep in zip(contexts, are_users_shown, strict=True)
    ]
    users = towers.users(collate([(context, NO_CANDIDATES) for context in contexts], config))
    posts, authors = hide(log.post_id[rows], rng, settings.hidden_post_share), log.author_id[rows]
    vectors = towers.posts(
        torch.from_numpy(hash_rows(posts, config.post_hashes)),
        torch.from_numpy(hash_rows(authors, config.author_hashes)),
        torch.from_numpy(examples.codes(rows)),
    )
    logits = users @ vectors.T / settings.temperature - torch.from_numpy(pairs.log_share[rows])
    key = pairs.key[rows]
    same = torch.from_numpy(key[: len(requests), None] == key[None, :])
    same[torch.arange(len(requests)), torch.arange(len(requests))] = False
    return functional.cross_entropy(logits.masked_fill(same, -torch.inf), torch.arange(len(requests)))
