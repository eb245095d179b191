import numpy as np
import pytest

from tanager.models.foreign import layouts


CASES = {
    "SAME": ((3, 2), (3, 2)),
    "LINEAR": ((5, 3), (3, 5)),
    "CONV": ((7, 4, 3, 2), (3, 2, 4, 7)),
    "FIRST_AXIS": ((1, 5, 3), (5, 3)),
    "FIRST_TWO_AXES": ((1, 1, 3), (3,)),
    "GAIN": ((6, 1, 1, 1), (6,)),
    "POINTWISE": ((5, 3, 1, 1), (3, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_axes_go_where_the_name_says_and_back(name):
    layout = getattr(layouts, name)
    theirs, ours = CASES[name]
    array = np.arange(np.prod(theirs)).reshape(theirs)
    moved = layout.to_ours(array)
    assert moved.shape == ours
    assert np.array_equal(layout.to_theirs(moved), array)


def test_a_kernel_keeps_its_entries():
    theirs = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    ours = layouts.CONV.to_ours(theirs)
    assert ours[1, 2, 0, 1] == theirs[1, 0, 1, 2]


def test_one_tensor_of_ours_is_several_of_theirs():
    joined = layouts.Foreign(("q", "k", "v"), layouts.LINEAR)
    theirs = [np.arange(8).reshape(2, 4) + 100 * n for n in range(3)]
    ours = joined.to_ours(theirs)
    assert ours.shape == (4, 6)
    assert ours[3, 0] == 3 and ours[3, 2] == 103 and ours[0, 5] == 204
    for back, array in zip(joined.to_theirs(ours), theirs, strict=True):
        np.testing.assert_array_equal(back, array)


def test_a_scaled_layout_multiplies_one_way_and_divides_the_other():
    theirs = np.arange(6, dtype=np.float32).reshape(2, 3)
    layout = layouts.scaled(layouts.LINEAR, 4.0)
    ours = layout.to_ours(theirs)
    assert ours.dtype == np.float32
    assert np.array_equal(ours, 4 * theirs.T)
    assert np.array_equal(layout.to_theirs(ours), theirs)
