"""A result that claims what cannot be is not shown, whoever wrote it."""

import json

import pytest
from written import RESULT

from tanager.report.run_files import read_result


CANNOT_BE = [
    *({"delta": 0.0}, {"epsilon": -1.0}, {"epsilon": None}, {"noise_multiplier": 0.0}),
    *({"clip_norm": 0.0}, {"clip_norm": None}, {"steps": 0}, {"sample_rate": 1.5}),
    *({"adjacency": "none"}, {"accountant": "moments"}, {"unit": "batch"}),
]


@pytest.mark.parametrize("claim", CANNOT_BE, ids=str)
def test_a_result_that_cannot_be_is_refused(tmp_path, claim):
    (tmp_path / "result.json").write_text(json.dumps(RESULT | claim))
    with pytest.raises(ValueError, match=r"result\.json'\) claims what cannot be"):
        read_result(tmp_path)
