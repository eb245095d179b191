"""What may be said of an audit on the command line."""

import dataclasses
from typing import Literal

from tanager import _validate as validate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What an audit does with a recipe."""

    method: Literal["white-box", "membership", "one-run", "replay"] = "white-box"
    """The attack. white-box: gradient canaries in a run whose every update is seen;
    membership: many models, half of which have a canary in their data; one-run: many
    examples as canaries, and the trained model alone. replay is none: a few steps again
    with known secrets, compared with the definition of DP-SGD."""

    confidence: float | None = None
    """That a bound is below the true ε; 0.999 for membership and else 0.95 by
    default."""

    audited_examples: int | None = None
    """How many of the training examples are trained on: by default 256 of a white-box
    audit, 100 of membership, 24 of a replay, and all of one-run."""

    canaries: int = 2000
    """white-box, one-run: how many; about half of them join the data."""

    knows_sample: bool = False
    """white-box: the attacker also knows who was sampled: tells much from few steps,
    and takes it as claimed that sampling is Poisson."""

    audited_steps: int | None = None
    """white-box: steps to run; all of them by default. What fewer prove of the noise is
    put into the whole run."""

    guessed: float = 0.1
    """one-run: share of the canaries that are guessed about."""

    models: int = 1000
    """membership: how many to train for the bound, half of them with the canary."""

    sweep_models: int | None = None
    """membership: how many to train before, to choose the setting; by default half as
    many."""

    audited_batch_size: float = 64
    """membership: expected batch size. The noise follows from the recipe's ε and δ."""

    update_counts: tuple[int, ...] = (50, 100)
    """membership: numbers of steps to choose from."""

    learning_rates: tuple[float, ...] = (0.1, 0.5, 1.0)
    """membership: learning rates to choose from."""

    clip_norms: tuple[float, ...] = (0.1, 1.0, 10.0)
    """membership: clipping norms to choose from."""

    canary_kinds: tuple[Literal["blank", "noise", "mislabelled"], ...] = (
        "blank",
        "noise",
        "mislabelled",
    )
    """membership: canaries to choose from."""

    models_at_once: int = 16
    """membership: models in one program."""

    json: bool = False
    """Print one JSON object and nothing else."""

    def __post_init__(self):
        if self.audited_examples is not None:
            validate.whole(audited_examples=self.audited_examples, at_least=1)
