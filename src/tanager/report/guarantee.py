"""What a run may claim, in sentences that its report and its model card share."""

import math
from collections.abc import Mapping
from typing import Any

from tanager.privacy.shown import format_epsilon


_Fields = Mapping[str, Any]

_PROTECTS = {
    "zero-out": "In one of them it is replaced by nothing. Its content is protected; "
    "the number of examples is public.",
    "add-or-remove-one": "Only one of them contains it; the others keep their places. "
    "Its presence is protected, and so is the number of examples: the number published "
    "here was declared without counting.",
    "replace-one": "In one of them another example is in its place. Its content is "
    "protected; the number of examples is public.",
}


def claim(result: _Fields) -> str:
    """Return the guarantee as numbers: (ε = 3, δ = 1e-05)."""
    return f"(ε = {format_epsilon(result['epsilon'])}, δ = {number(result['delta'])})"


def meaning(result: _Fields) -> str:
    """Return one sentence on what ε and δ mean for one image."""
    other = "that image were not in the data"
    if result["adjacency"] == "replace-one":
        other = "another image were in its place"
    return (
        "Seeing this model makes any conclusion about one image at most "
        f"e^ε = {factor(result['epsilon'])} times more likely than if {other} "
        f"(with a failure probability of δ = {number(result['delta'])})."
    )


def mechanism(result: _Fields) -> str:
    """Return two sentences on how the training examples were used."""
    return (
        f"DP-SGD made {result['steps']:,} updates on {result['examples']:,} examples. "
        "Each update drew a Poisson sample of the examples at rate "
        f"q = {number(result['sample_rate'])} "
        f"(expected batch size {number(result['batch_size'])}), clipped each gradient "
        f"to norm C = {number(result['clip_norm'])} and added Gaussian noise with "
        f"noise multiplier σ = {number(result['noise_multiplier'])}."
    )


def accounting(result: _Fields) -> str:
    """Return how ε was computed, and what all runs on the same data spent."""
    return f"{_alone(result)} {_together(result)}".rstrip()


def _together(result: _Fields) -> str:
    if not (total := result.get("account")):
        return ""
    return (
        "When it ended, all runs on these data that were charged to their account, "
        f"this one included, had spent ε = {format_epsilon(total['epsilon'])} at "
        f"δ = {number(total['delta'])} together ({total['adjacency']}, "
        f"{total['accountant'].upper()})."
    )


def _alone(result: _Fields) -> str:
    version = (result.get("versions") or {}).get("dp-accounting", "")
    if search := result.get("search"):
        return (
            "This run is the best of a secret random number of such runs, "
            f"{number(search['mean'])} on average. ε covers the whole search. It was "
            f"computed with RDP by dp_accounting {version} (Papernot and Steinke 2022)."
        )
    by = str(result["accountant"]).upper()
    return f"ε was computed with {by} by dp_accounting {version}."


def assumptions(result: _Fields) -> list[str]:
    """Return what the guarantee assumes, and what it does not protect."""
    adjacency = result["adjacency"]
    unprotected = "The test set is public: nothing here protects the test images."
    choices = (
        "Tuning hyper-parameters on the private data is not counted. If they were "
        "chosen with that data, ε is larger."
    )
    if search := result.get("search"):
        unprotected = (
            f"The {text(search['held_out_examples'])} held-out images are protected as "
            "the others are, because noise was added to their scores. The number of "
            "held-out examples is public."
        )
        choices = (
            "The hyper-parameters were chosen by this search alone. It ran once, to "
            "its end. How long it took is not released."
        )
    skipped = (
        "Images that could not be read contributed nothing. They count among the "
        "examples; how many there were is private."
    )
    return [
        *([skipped] if result.get("unreadable") == "skip" else []),
        "The guarantee is per image. A person with several images is protected less.",
        "The guarantee compares two data sets that differ in one example. "
        f"{_PROTECTS.get(adjacency, adjacency)}",
        f"{unprotected} The initial parameters do not depend on the private data.",
        choices,
        "The secret seed and the whole folder private/ stay secret.",
        "The pseudo-random numbers (AES-256) are as good as random. Rounding is "
        "covered: sums and noise are whole numbers on a public grid, and the noise "
        "covers the rounding before it.",
    ]


def reason_against(result: _Fields) -> str:
    """Return why a run that is not private has no guarantee."""
    if result.get("private_search"):
        return (
            "It is one of the runs of a private search. The guarantee covers only the "
            "best of them, in the folder of the search."
        )
    if result["noise_multiplier"] == 0:
        return "No noise was added (noise multiplier 0)."
    return (
        "The seed was fixed by a person. Whoever knows that number can compute the "
        "noise again and subtract it."
    )


def recomputation(result: _Fields) -> str:
    """Return a program that computes ε again from the mechanism, without tanager."""
    step = f"""\
noise = dp_event.GaussianDpEvent({result["noise_multiplier"]!r})
step = dp_event.PoissonSampledDpEvent({result["sample_rate"]!r}, noise)
run = dp_event.SelfComposedDpEvent(step, {result["steps"]!r})
"""
    spent = f"print(accountant.get_epsilon({result['delta']!r}))"
    if search := result.get("search"):
        shape = search["shape"]
        shape = 'float("inf")' if shape is None else repr(shape)
        return f"""\
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

{step}\
search = dp_event.RepeatAndSelectDpEvent(run, {search["mean"]!r}, {shape})
orders = [1 + tenth / 10 for tenth in range(1, 100)]
accountant = RdpAccountant([*orders, *range(11, 513)])
accountant.compose(search)
{spent}"""
    # Zero-out has the ε of add-or-remove-one.
    replaced = result["adjacency"] == "replace-one"
    relation = "REPLACE_ONE" if replaced else "ADD_OR_REMOVE_ONE"
    return f"""\
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import PLDAccountant

{step}\
accountant = PLDAccountant(NeighboringRelation.{relation})
accountant.compose(run)
{spent}"""


def factor(epsilon: float) -> str:
    """Return e^ε, rounded up."""
    return simulated(math.exp(epsilon) if epsilon < 700 else None)


def simulated(value: float | None) -> str:
    """Return a value rounded up, short where it is huge, as a simulation's ε can be."""
    if value is None:
        return "infinite"
    shown = format_epsilon(value)
    if value < 1000:
        return shown
    return f"{int(shown):,}" if value < 1e7 else f"{float(shown):.4g}"


def number(value: float | None) -> str:
    """Return a number with six significant digits."""
    if value is None:
        return "none"
    return "∞" if math.isinf(value) else f"{value:.6g}"


def percent(share: float | None) -> str:
    """Return a share in percent, to one decimal."""
    if share is None or not math.isfinite(share):
        return "not measured"
    return f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Return a time in hours and minutes, or minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


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
