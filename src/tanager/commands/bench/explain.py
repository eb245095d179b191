"""`tanager bench explain`: how each tap of a model is clipped."""

import dataclasses
from collections.abc import Callable

from tanager import _validate as validate
from tanager.commands.bench.measured import Measured, Outcome


@dataclasses.dataclass(frozen=True)
class Explain(Measured):
    """Print where parameters meet data, and how each such tap is clipped."""

    physical_batch: int = 32
    """Rows of the physical batch."""

    strategy: str = "auto"
    """Clipping strategy."""

    def measure(self, report: Callable[[str], None]) -> Outcome:
        """Measure; `report` receives what is being done."""
        from tanager.clipping import STRATEGIES

        validate.one_of(STRATEGIES, strategy=self.strategy)
        validate.whole(physical_batch=self.physical_batch, at_least=1)
        workload = self.workload()
        with workload.computing():
            explanation = workload.step(self.strategy).grad_fn.explain(
                workload.params(), workload.batch(self.physical_batch)
            )
        record = {
            "explain": explanation.as_json(),
            "workload": dataclasses.asdict(workload),
            "physical_batch": self.physical_batch,
            "strategy": self.strategy,
        }
        return Outcome(record, [str(explanation)], 0)
