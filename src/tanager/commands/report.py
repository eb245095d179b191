"""`tanager report`: make the page of a finished run again."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from tanager.commands import flags


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Write report.html of a finished run again, from the run's public files.

    A run whose result.json does not follow from its ledger is refused.
    """

    run: Positional[Path]
    """Folder of a finished run."""


def run(arguments: Sequence[str]) -> int:
    options = flags.read(Arguments, "report", arguments)

    from tanager.report.run_page import write_report
    from tanager.training.export import check_claims

    check_claims(options.run)
    print(write_report(options.run))
    return 0
