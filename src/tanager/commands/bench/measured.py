"""What every `tanager bench` command measures, and what it hands back."""

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from tanager import _validate as validate
from tanager.commands import flags


if TYPE_CHECKING:
    from tanager.bench.workload import Workload


STOPPED = 130
"""The exit status after Ctrl-C."""

_VECTOR_MODELS = ("mlp", "linear")


def exit_code(rows: list[dict[str, Any]], stopped: bool) -> int:
    """Return the exit status: 1 where there are rows, and none has a result."""
    if stopped:
        return STOPPED
    return int(bool(rows) and all(row["error"] is not None for row in rows))


class Outcome(NamedTuple):
    """What a command found: for ``--json``, for people, and its exit status."""

    record: dict[str, Any]
    lines: list[Any]
    code: int


@dataclasses.dataclass(frozen=True)
class Measured(abc.ABC):
    """A model and its data; what is measured of them is up to the command."""

    model: str = "wrn-16-4"
    """Name of a model."""

    classes: int = 10
    """Number of classes."""

    image_size: int | None = None
    """Pixels per side of the images. Default: the model's own."""

    channels: int | None = None
    """Channels of the images. Default: the model's own."""

    features: int | None = None
    """For mlp and linear: length of a feature vector, instead of images."""

    views: int = 1
    """Augmented views K of each example, averaged before clipping."""

    precision: Annotated[str, tyro.conf.arg(metavar="{float32,tf32,bfloat16}")] = (
        "float32"
    )
    """Precision of the forward and backward pass."""

    clip_norm: float = 1.0
    """Clipping norm C."""

    json: flags.Json = False

    @abc.abstractmethod
    def measure(self, report: Callable[[str], None]) -> Outcome:
        """Measure; `report` receives what is being done."""

    def workload(self) -> "Workload":
        """Return what these options describe."""
        from tanager.bench.workload import Workload

        return Workload(
            self.model,
            self._image_shape(),
            classes=self.classes,
            views=self.views,
            precision=self.precision,
            clip_norm=self.clip_norm,
        )

    def _image_shape(self) -> tuple[int, ...]:
        if self.features is not None:
            validate.one_of(
                _VECTOR_MODELS,
                model=self.model,
                remedy="other models take images: leave --features away",
            )
            for name in ("image_size", "channels"):
                if (given := getattr(self, name)) is not None:
                    rule, remedy = "is of images", "leave it out with --features"
                    validate.refuse(name, given, rule, remedy)
            return (self.features,)
        from tanager.models import find

        entry = find(self.model)
        side = entry.image_side if self.image_size is None else self.image_size
        channels = entry.channels if self.channels is None else self.channels
        return (side, side, channels)
