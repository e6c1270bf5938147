"""Discs that would cover each other are moved apart, no more than that takes."""

import numpy as np
import pytest

from attnscope.drawing.plots import spread

BOX = (0.0, 0.0, 100.0, 60.0)


def nearest(at: np.ndarray) -> float:
    apart = np.hypot(*np.moveaxis(at[:, None] - at, -1, 0))
    return float((apart + np.eye(len(at)) * 1e9).min())


@pytest.mark.parametrize("seed", range(5))
def test_discs_that_cover_each_other_are_moved_apart_within_their_box(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    places = np.concatenate([drawn.normal((50, 58), 4, (20, 2)), [[5, 5], [90, 10]]])
    at = spread(places, 3.0, BOX)
    assert nearest(places) < 3 and nearest(at) > 5.8
    assert (at >= 3).all() and (at <= (97, 57)).all()
    assert (at[-2:] == places[-2:]).all(), "nothing covers these"


def test_heads_that_lie_in_one_place_part_the_same_way_each_time() -> None:
    places = np.full((9, 2), 30.0)
    at = spread(places, 3.0, BOX)
    assert nearest(at) > 5.8 and (at == spread(places, 3.0, BOX)).all() and (places == 30).all()


def test_one_disc_and_none_stay() -> None:
    assert spread(np.zeros((0, 2)), 3.0, BOX).shape == (0, 2)
    assert (spread(np.array([[30.0, 30.0]]), 3.0, BOX) == 30).all()
