"""What a run may claim, in words that its report and its model card share."""

import math
from collections.abc import Mapping
from typing import Any

from tanager.privacy.shown import upper


_Fields = Mapping[str, Any]

_PROTECTS = {
    "zero-out": "one example, which in one of them is replaced by nothing: what it "
    "says is protected, and the number of examples is public",
    "add-or-remove-one": "one example, which only one of them has, while the others "
    "keep their places: that it was there is protected, and so is the number of "
    "examples",
    "replace-one": "one example, exchanged for another: what it says is protected, and "
    "the number of examples is public",
}

_RELATIONS = {"replace-one": "REPLACE_ONE"}
"""By adjacency, as dp_accounting names it; the others have the same ε."""


def claim(result: _Fields) -> str:
    """Return the guarantee as numbers: (ε = 3, δ = 1e-05)."""
    return f"(ε = {upper(result['epsilon'])}, δ = {number(result['delta'])})"


def mechanism(result: _Fields) -> str:
    """Return one sentence on what was done to the training examples."""
    return (
        f"DP-SGD made {result['steps']:,} updates on {result['examples']:,} examples, "
        f"each on a Poisson sample at rate q = {number(result['sample_rate'])} "
        f"(expected batch {number(result['batch_size'])}), with gradients clipped to "
        f"C = {number(result['clip_norm'])} and Gaussian noise of multiplier "
        f"σ = {number(result['noise_multiplier'])}."
    )


def accounting(result: _Fields) -> str:
    """Return one sentence on how ε was computed."""
    version = (result.get("versions") or {}).get("dp-accounting", "")
    if search := result.get("search"):
        return (
            "It is the best of a secret random number of such runs, "
            f"{number(search['mean'])} on average, and ε is that of the whole search: "
            f"computed with RDP by dp_accounting {version} (Papernot and Steinke 2022)."
        )
    by = str(result["accountant"]).upper()
    return f"ε was computed with {by} by dp_accounting {version}."


def assumptions(result: _Fields) -> list[str]:
    """Return the sentences a guarantee rests on: what it does not protect, too."""
    adjacency = result["adjacency"]
    skipped = (
        "Images that could not be read contributed nothing. They count among the "
        "examples; how many there were is private."
    )
    return [
        *([skipped] if result.get("unreadable") == "skip" else []),
        "The guarantee is per image. A person with several images is protected less.",
        f"Neighbouring data sets differ in {_PROTECTS.get(adjacency, adjacency)}.",
        f"{_on_other_images(result)} The initial parameters do not depend on the "
        "private data.",
        _on_choices(result),
        "The secret seed, and all of the folder private/, stay secret.",
        "The pseudo-random numbers (AES-256) are as good as random. Rounding is part "
        "of the guarantee: sums and noise are whole numbers on a public grid, and the "
        "noise covers the rounding before it.",
    ]


def _on_other_images(result: _Fields) -> str:
    if search := result.get("search"):
        return (
            "The numbers of training and of held-out examples are public. The "
            f"{text(search['held_out_examples'])} held-out images are protected as the "
            "others are: their scores were given noise."
        )
    return (
        "The number of training examples and the test set are public, so nothing here "
        "protects the test images."
    )


def _on_choices(result: _Fields) -> str:
    if result.get("search"):
        return (
            "The hyper-parameters were chosen by this search alone, which was run to "
            "its end and once; how long it took is not released."
        )
    return (
        "Tuning hyper-parameters on the private data is not counted: they were chosen "
        "without it, or ε is larger."
    )


def reason_against(result: _Fields) -> str:
    """Return why a run that is not private has no guarantee."""
    if result.get("private_search"):
        return (
            "It is one of the runs of a private search, whose guarantee is for the "
            "best of them alone, in the folder of the search."
        )
    if result["noise_multiplier"] == 0:
        return "No noise was added (noise multiplier 0)."
    return (
        "The seed was fixed by a person: whoever knows that number can repeat the "
        "noise and take it away."
    )


def recomputation(result: _Fields) -> str:
    """Return a program that computes ε again from the mechanism, without tanager."""
    relation = _RELATIONS.get(result["adjacency"], "ADD_OR_REMOVE_ONE")
    if search := result.get("search"):
        return "\n".join(
            [
                "from dp_accounting import dp_event",
                "from dp_accounting.rdp import RdpAccountant",
                "",
                f"noise = dp_event.GaussianDpEvent({result['noise_multiplier']!r})",
                "step = dp_event.PoissonSampledDpEvent("
                f"{result['sample_rate']!r}, noise)",
                f"run = dp_event.SelfComposedDpEvent(step, {result['steps']!r})",
                "search = dp_event.RepeatAndSelectDpEvent("
                f"run, {search['mean']!r}, {_shape(search['shape'])})",
                "orders = [1 + tenth / 10 for tenth in range(1, 100)]",
                "accountant = RdpAccountant([*orders, *range(11, 513)])",
                "accountant.compose(search)",
                f"print(accountant.get_epsilon({result['delta']!r}))",
            ]
        )
    return "\n".join(
        [
            "from dp_accounting import NeighboringRelation, dp_event",
            "from dp_accounting.pld import PLDAccountant",
            "",
            f"noise = dp_event.GaussianDpEvent({result['noise_multiplier']!r})",
            f"step = dp_event.PoissonSampledDpEvent({result['sample_rate']!r}, noise)",
            f"accountant = PLDAccountant(NeighboringRelation.{relation})",
            "accountant.compose("
            f"dp_event.SelfComposedDpEvent(step, {result['steps']!r}))",
            f"print(accountant.get_epsilon({result['delta']!r}))",
        ]
    )


def _shape(shape: float | None) -> str:
    return 'float("inf")' if shape is None else repr(shape)


def number(value: float | None) -> str:
    """Six significant digits."""
    if value is None:
        return "none"
    return "∞" if math.isinf(value) else f"{value:.6g}"


def percent(share: float | None) -> str:
    """Return a share in percent, to one decimal."""
    if share is None or not math.isfinite(share):
        return "not measured"
    return f"{100 * share:.1f} %"


def text(value: Any) -> str:
    """Return a value of a table as people read it."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return number(value)
        case Mapping():
            return ", ".join(f"{name} {text(value[name])}" for name in value) or "none"
        case list() | tuple():
            return ", ".join(text(each) for each in value) or "none"
        case _:
            return str(value)
