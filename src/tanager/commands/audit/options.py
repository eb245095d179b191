"""What may be said of an audit on the command line."""

import dataclasses
from collections.abc import Collection
from typing import ClassVar, Literal

from tanager import _validate as validate
from tanager.commands import flags
from tanager.recipes.accounts import NONE
from tanager.recipes.recipe import Recipe


_METHODS = {
    "confidence": ("white-box", "membership", "one-run"),
    "canaries": ("white-box", "one-run"),
    "canary_examples": ("white-box",),
    "knows_sample": ("white-box",),
    "audited_steps": ("white-box",),
    "guessed": ("one-run",),
    "models": ("membership",),
    "sweep_models": ("membership",),
    "audited_batch_size": ("membership",),
    "update_counts": ("membership",),
    "learning_rates": ("membership",),
    "clip_norms": ("membership",),
    "canary_kinds": ("membership",),
    "models_at_once": ("membership",),
}
"""The methods that heed a flag, where not all do."""

_OF_MEMBERSHIP = {
    "steps": "update_counts",
    "batch_size": "audited_batch_size",
    "learning_rate": "learning_rates",
    "clip_norm": "clip_norms",
    "optimizer": None,
    "optimizer_options": None,
    "learning_rate_schedule": None,
    "warmup_steps": None,
    "weight_decay": None,
    "ema_decay": None,
}
"""What of a recipe membership takes from its own flag, or not at all (None)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Attack the real training code, and bound the ε that it spends from below.

    white-box puts gradient canaries into a run and sees every update. membership trains
    many models, half of them with a canary. one-run adds many canary examples and sees
    the trained model alone. replay attacks nothing: it runs a few steps with known
    secrets and compares them with the definition of DP-SGD.
    """

    SHORT: ClassVar[tuple[str, ...]] = (
        "method",
        "confidence",
        "audited_examples",
        "canaries",
        "audited_steps",
        "models",
        "sweep_models",
        "json",
        *flags.USUAL,
    )

    method: Literal["white-box", "membership", "one-run", "replay"] = "white-box"
    """The kind of audit; see above."""

    confidence: float | None = None
    """Probability that the bound holds. Default: 0.95; membership: 0.999."""

    audited_examples: int | None = None
    """Images, or persons. Default: white-box 256, membership 100, replay 24."""

    canaries: int | None = None
    """white-box, one-run: number of canaries; about half join the data. Default: 2000;
    one-run: all test images if fewer."""

    canary_examples: int = 1
    """white-box: examples of each canary: 1, or those of a person (--unit group)."""

    knows_sample: bool = False
    """white-box: the attacker knows each batch; sampling itself is not tested."""

    audited_steps: int | None = None
    """white-box: number of steps to run, in place of the whole run. Default: all."""

    guessed: float = 0.1
    """one-run: share of the canaries that the attacker guesses, 0 to 1."""

    models: int = 1000
    """membership: models to train for the bound, half with the canary."""

    sweep_models: int | None = None
    """membership: models to train first, to choose settings. Default: half."""

    audited_batch_size: float | None = None
    """membership: expected batch size. Default: 64; all for batch size 0."""

    update_counts: tuple[int, ...] | None = None
    """membership: steps to choose from. Default: 50 100, or the solver's."""

    learning_rates: tuple[float, ...] | None = None
    """membership: to choose from. Default: 0.1 0.5 1, or the solver's."""

    clip_norms: tuple[float, ...] | None = None
    """membership: to choose from. Default: 0.1 1 10, or the solver's."""

    canary_kinds: tuple[Literal["blank", "noise", "mislabelled"], ...] = (
        "blank",
        "noise",
        "mislabelled",
    )
    """membership: kinds of canary to choose from."""

    models_at_once: int = 16
    """membership: models trained in one program."""

    json: flags.Json = False

    def __post_init__(self):
        for name in ("audited_examples", "audited_steps", "canaries"):
            if getattr(self, name) is not None:
                validate.whole(at_least=1, **{name: getattr(self, name)})

    def refuse_unused(self, recipe: Recipe, given: Collection[str]) -> None:
        """Refuse flags that were given and that the method does not heed."""
        for name, methods in _METHODS.items():
            if name in given and self.method not in methods:
                rule = f"applies to --method {', '.join(methods)} alone"
                validate.refuse(name, getattr(self, name), rule, "leave it out")
        for name in ("evaluate_every", "test_views"):
            if name in given and getattr(recipe, name):
                rule = "does not apply to an audit, which measures no accuracy"
                validate.refuse(name, getattr(recipe, name), rule, "leave it out")
        charged = "account" in given and recipe.account != NONE
        if self.method == "replay" and charged:
            rule = "is not charged for a replay, whose findings may not be published"
            validate.refuse("account", recipe.account, rule, "leave it out")
        solved = recipe.leaves_open or recipe.solver != "dp-sgd"
        if self.method != "membership" or solved:
            return
        for name, own in _OF_MEMBERSHIP.items():
            if name in given and getattr(recipe, name):  # batch size 0 is all examples
                rule = "does not apply to --method membership"
                remedy = f"give --{own.replace('_', '-')}" if own else "leave it out"
                validate.refuse(name, getattr(recipe, name), rule, remedy)
