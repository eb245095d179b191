"""Make all hosts clip alike: they use what the chief has measured."""

from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from tanager.clipping import Explanation
from tanager.clipping.planning.autotune import Timings
from tanager.parallel import hosts
from tanager.training.step import Step


def sync_clipping(
    step: Step,
    params: PyTree,
    one: Any,
    physical_batch_size: int,
    report: Callable[[str], None],
) -> Explanation:
    """Return how every device clips its rows, as measured on the chief.

    Other timings would choose other methods, whose sums round differently, and on
    several hosts the devices must run one program.

    Args:
        step: of the run.
        params: its trained leaves.
        one: an example, on a leading axis of 1.
        physical_batch_size: rows of all devices together.
        report: called with what is being measured.

    Raises:
        ValueError: a host's devices are of another kind, so that its methods differ.
    """

    def explained() -> Explanation:
        return step.explain(params, one, physical_batch_size, report)

    clipping = explained() if hosts.is_chief() else None
    timings = hosts.from_chief(lambda: Timings().as_json())
    if clipping is None:
        Timings().adopt(timings)
        step.forget_traces()
        clipping = explained()
    hosts.require_same("clipping", clipping.fingerprint)
    return clipping
