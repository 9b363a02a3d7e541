"""What retrieval is measured against: the true value of a post to a user, moved by every cause that the world states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from weights.evaluate.retrieval import true_values
from weights.world.behaviour import ACTION_NAMES
from weights.world.simulate import World

FAVORITE = ACTION_NAMES.index("favorite")


@pytest.mark.parametrize(("part", "cause"), [("authors", "quality"), ("posts", "quality"), ("users", "surface_taste")])
def test_what_a_user_likes_better_is_worth_more(world: World, part: str, cause: str) -> None:
    holder: Any = getattr(world, part)
    changed = replace(world, **{part: replace(holder, **{cause: getattr(holder, cause) + 1})})
    before, after = (true_values(each, 3, np.arange(60))[:, FAVORITE] for each in (world, changed))
    assert ((before > 0) & (before < after) & (after < 1)).all()


def test_whom_a_user_follows_is_worth_more(world: World) -> None:
    alone = replace(world, users=replace(world.users, follows=np.zeros_like(world.users.follows)))
    followed = world.users.follows[3, world.posts.author[:60]]
    assert followed.any()
    before, after = (true_values(each, 3, np.arange(60))[:, FAVORITE] for each in (alone, world))
    assert (before[followed] < after[followed]).all()
    assert np.array_equal(before[~followed], after[~followed])
