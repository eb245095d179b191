"""The tables of `tanager evaluate`."""

import numpy as np
import pytest

from tanager.commands.evaluation_tables import print_classes, print_labels
from tanager.measures import measure, measure_labels


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_a_dash_is_explained_where_there_is_one(capsys, several, lacking):
    random, classes = np.random.default_rng(0), ["cat", "dog", "eel"]
    labels = random.integers(0, 2 if lacking else 3, 90)
    probabilities = random.dirichlet(np.ones(3), 90)
    if several:
        found = measure_labels(probabilities, np.eye(3)[labels], classes)
        print_labels("many labels", found)
    else:
        print_classes("classes", measure(probabilities, labels, classes))
    printed = capsys.readouterr().out
    assert ("–" in printed) == ("\n–: not defined" in printed) == lacking
    assert "several of a person make them too narrow" in printed
