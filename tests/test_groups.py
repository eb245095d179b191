"""Whose the examples are, and which of them a step uses."""

import numpy as np
import pytest
from scipy import stats

from tanager.groups import MOST_EXAMPLES, Groups
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PoissonSampler
from tanager.seed import Seed


FALSE_ALARM = 1e-6
OWNERS = ["eve", "bob", "eve", "ann", "eve", "bob", "eve", "eve"]
SECRET = Seed.from_int(3)


def test_members_are_the_examples_of_their_owner():
    groups = Groups(OWNERS, 2)
    assert len(groups) == 3
    found = [groups.members(number).tolist() for number in range(3)]
    assert found == [[3], [1, 5], [0, 2, 4, 6, 7]]
    joined = groups.joined(2, 3)
    assert [joined.members(n).tolist() for n in (3, 4)] == [[8, 9, 10], [11, 12, 13]]
    assert joined.members(2).tolist() == found[2]


def test_all_examples_are_used_or_k_of_them_drawn_uniformly():
    """Every pair of five is as likely: χ² over the ten pairs, false alarm 1e-6."""
    groups = Groups(OWNERS, 2)
    pairs = {}
    for step in range(2000):
        mask, indices = groups.choose(SECRET, step, [2, 0])
        assert mask.tolist() == [[True, True], [True, False]]
        assert set(indices[1]) == {3}
        pair = tuple(indices[0])
        assert len(set(pair)) == 2 and set(pair) <= {0, 2, 4, 6, 7}
        pairs[pair] = pairs.get(pair, 0) + 1
    assert len(pairs) == 10
    assert stats.chisquare(list(pairs.values())).pvalue > FALSE_ALARM


def test_a_draw_depends_on_no_other_group():
    """Were it otherwise, one person's examples could move what others contribute."""
    groups, other = Groups(OWNERS, 2), Groups([*OWNERS, "bob", "bob", "ann"], 2)
    for step in range(20):
        alone = groups.choose(SECRET, step, [2])[1]
        np.testing.assert_array_equal(
            groups.choose(SECRET, step, [0, 1, 2])[1][2:], alone
        )
        np.testing.assert_array_equal(other.choose(SECRET, step, [2])[1], alone)
    alike = Groups(np.repeat([0, 1], 5), 2)
    drawn = np.array([alike.choose(SECRET, step, [0, 1])[1] for step in range(20)])
    assert (drawn[:, 0] != drawn[:, 1] - 5).any()


def test_the_sampler_draws_groups():
    groups = Groups(np.repeat(np.arange(500), 7), 3)
    mechanism = Mechanism(0.2, 1.0, 5)
    sampler = PoissonSampler(mechanism, 500, SECRET, groups=groups)
    plain = PoissonSampler(mechanism, 500, SECRET)
    assert sampler.expected_batch_size == 100
    for step in range(5):
        drawn = plain.indices(step)
        parts = list(sampler.batches(step, 32))
        mask = np.concatenate([part.mask for part in parts])
        indices = np.concatenate([part.indices for part in parts])
        assert mask.shape == indices.shape == (32 * len(parts), 3)
        assert mask[: len(drawn)].all() and not mask[len(drawn) :].any()
        np.testing.assert_array_equal(
            indices[: len(drawn)], groups.choose(SECRET, step, drawn)[1]
        )
    with pytest.raises(ValueError, match="number of groups, 500"):
        PoissonSampler(mechanism, 501, SECRET, groups=groups)


def test_large_numbers_are_owners():
    """NumPy makes floats of these, in which the last two would be one person."""
    for low in (0, 2**70):
        found = Groups([low + 2**63, 1, low + 2**63 + 1, 1], 1).numbers
        assert found.tolist() == [1, 0, 2, 0]
    unmasked = np.ma.array([1, 5, 2])
    assert Groups(unmasked, 1).numbers.tolist() == [0, 2, 1]


def test_more_examples_of_a_person_than_fit_are_refused():
    Groups([1, 2], MOST_EXAMPLES)
    with pytest.raises(
        ValueError, match=r"per_group .=100000000. must be at most 4096"
    ):
        Groups([1, 2], 10**8)


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        ([["zoe", "bob"], ["zoe", "eve"]], "one owner for each example"),
        ([["zoe"], ["zoe", "eve"]], "one owner for each example"),
        ([], "one owner for each example"),
        (None, r"owners \(=None\) must be given to protect persons: load the data wit"),
        (["zoe", None], "none of them missing"),
        (
            np.ma.array([1, 5, 2], mask=[False, True, False]),
            "=.masked.* none of them missing",
        ),
        ([1.0, float("nan")], "whole numbers or texts"),
    ],
)
def test_examples_of_several_owners_or_none_are_refused(owners, message):
    with pytest.raises(ValueError, match=message) as refused:
        Groups(owners, 2)
    assert "zoe" not in str(refused.value)


@pytest.mark.parametrize("most", [0, -1, 1.5])
def test_k_is_at_least_one(most):
    with pytest.raises(ValueError, match="examples_per_group"):
        Groups(OWNERS, most)
