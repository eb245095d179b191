"""What a run may claim, in sentences that its report and its model card share."""

import datetime
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tanager.privacy import accountant as accountants
from tanager.privacy.mechanism import LARGE_EPSILON, Mechanism
from tanager.privacy.plan import few_warning
from tanager.privacy.shown import format_delta, format_epsilon, format_share


_Fields = Mapping[str, Any]

_MECHANISM = ("sample_rate", "noise_multiplier", "steps", "adjacency")
_PROTECTS = {
    "zero-out": "In one of them it is replaced by nothing. Its content is protected; "
    "the number of {unit}s is public.",
    "add-or-remove-one": "Only one of them contains it; the others keep their places. "
    "Its presence is protected, and so is the number of {unit}s: the number published "
    "here was declared without counting.",
    "replace-one": "In one of them another {unit} is in its place. Its content is "
    "protected; the number of {unit}s is public.",
}
_PER_PERSON = (
    "The guarantee is per person, for all of their images together, if each image has "
    "the right owner in the data."
)


def unit(result: _Fields) -> str:
    """Return what the guarantee protects one of: example or person."""
    return result.get("unit") or "example"


def subject(result: _Fields) -> str:
    """Return the same as readers call it: image or person."""
    return "person" if unit(result) == "person" else "image"


def claim(result: _Fields) -> str:
    """Return the guarantee as numbers: (ε = 3, δ = 1e-05)."""
    epsilon, delta = format_epsilon(result["epsilon"]), format_delta(result["delta"])
    return f"(ε = {epsilon}, δ = {delta})"


def weakness(result: _Fields) -> str | None:
    """Return why a guarantee protects next to nothing; None if it protects."""
    if not result["private"]:
        return None
    if result["epsilon"] >= LARGE_EPSILON:
        return "An ε this large protects next to nothing."
    if result["delta"] * (result.get("examples") or 0) >= 1:
        return (
            "A δ this large protects next to nothing: what publishes one whole "
            f"{subject(result)} would have this guarantee too."
        )
    return None


def meaning(result: _Fields) -> str:
    """Return one sentence on what ε and δ mean for one image or person.

    δ is added to the probability; it is not the chance that the bound fails.
    """
    one = subject(result)
    other = f"that {one} were not in the data"
    if result["adjacency"] == "replace-one":
        other = f"another {one} were in its place"
    delta = format_delta(result["delta"])
    power = -Decimal(delta).adjusted()
    chance = f"{math.ceil(Decimal(delta).scaleb(power))} in {10**power:,}"
    return (
        f"Any conclusion about one {one} is drawn from this model with at most "
        f"e^ε = {factor(result['epsilon'])} times the probability that it would have "
        f"if {other}, plus δ = {delta} ({chance})."
    )


def risk_in_words(risk: _Fields, one: str = "image") -> str:
    """Return in two numbers what the best attack on one image or person can reach.

    Where members and others are equally many, (1 + advantage) / 2 of guesses are right.
    """
    return (
        f"Take someone who guesses whether one {one} was in the training data. By a "
        "coin toss they are right 50 % of the time, with the model at most "
        f"{_right(risk)}. If they may be wrong about 1 of 100 {_others(one)}, they "
        f"recognise at most {format_share(risk['tpr_at_1_percent'])} of the members "
        "(without the model: 1 %)."
    )


def _right(risk: _Fields) -> str:
    return format_share((1 + risk["advantage"]) / 2)


def _others(one: str) -> str:
    return "other persons" if one == "person" else f"other {one}s"


def risk_explained(one: str = "image") -> str:
    """Return what the words of `risk_rows` mean, and against whom they hold."""
    return (
        f"A member is one {one} that was in the training data. At 1 % false alarms, 1 "
        "of 100 others is taken for a member. No attack does better, even one that "
        "knows all other training data and sees every update."
    )


def risk_rows(risk: _Fields) -> list[tuple[str, str, str]]:
    """Return what attacks reach: which attack, at most, and without the model."""
    shares = (
        ("members recognised at 0.1 % false alarms", "tpr_at_0_1_percent", "0.1 %"),
        ("members recognised at 1 % false alarms", "tpr_at_1_percent", "1 %"),
        ("members recognised minus false alarms", "advantage", "0 %"),
    )
    rows = [(name, format_share(risk[key]), chance) for name, key, chance in shares]
    return [("right guesses, where half are members", _right(risk), "50 %"), *rows]


def risk_as_gaussian(risk: _Fields) -> str:
    """Return μ of Gaussian DP, rounded up, with its regret."""
    return f"{format_epsilon(risk['mu'])} (regret {risk['regret']:.2g})"


def mechanism(result: _Fields) -> str:
    """Return a few sentences on how the training examples were used."""
    one, averaged = unit(result), "clipped each gradient"
    if one == "person":
        averaged = (
            "took the mean gradient over at most "
            f"{text(result['examples_per_group'])} images of each, clipped it"
        )
    gamma, automatic, counted = result.get("clip_gamma"), "", ""
    adaptive = result.get("adaptive_clipping")
    if gamma is not None:
        automatic = f" (automatic clipping: a gradient g counts as C·g/(‖g‖ + {gamma}))"
    if adaptive is not None:
        automatic = (
            " at first, then to one that follows the "
            f"{number(adaptive['quantile'])}-quantile of their norms (adaptive "
            "clipping, by noisy counts that are part of ε),"
        )
    if (noise := result.get("class_counts_noise")) is not None:
        counted = (
            f" Class weights are from noisy counts: before the first update, how many "
            f"{one}s each class has was released once, with Gaussian noise of noise "
            f"multiplier {number(noise)}. ε includes this release."
        )
    drawn = (
        f"drew a Poisson sample of the {one}s at rate "
        f"q = {number(result['sample_rate'])} "
        f"(expected batch size {number(result['batch_size'])})"
    )
    if result["sample_rate"] == 1:
        drawn = "used all of them"
    return (
        f"DP-SGD made {result['steps']:,} update{'s' * (result['steps'] != 1)} "
        f"on {result['examples']:,} {one}s. "
        f"Each update {drawn}, {averaged} "
        f"to norm C = {number(result['clip_norm'])}{automatic} "
        f"and added Gaussian noise with noise multiplier "
        f"σ = {number(result['noise_multiplier'])}.{counted}"
    )


def accounting(result: _Fields) -> str:
    """Return how ε was computed, and what all runs on the same data spent."""
    return f"{alone(result)} {together(result)}".rstrip()


def together(result: _Fields) -> str:
    """Return what all runs on the same data spent; "" where no account counts it."""
    if not (total := result.get("account")):
        return ""
    return (
        "When it ended, all runs on these data that were charged to their account, "
        f"this one included, had spent ε = {format_epsilon(total['epsilon'])} at "
        f"δ = {format_delta(total['delta'])} together ({total['adjacency']}, "
        f"{total['accountant'].upper()}). Runs that were charged later are not in it."
    )


def held_out(search: _Fields) -> str:
    """Return why the score of a private search is not quite true."""
    return (
        f"The accuracy is on {text(search['held_out_examples'])} held-out examples, "
        f"with noise of standard deviation {number(search['score_noise'])} examples to "
        "protect them. As that of the best of several runs, it is likely too high."
    )


def alone(result: _Fields) -> str:
    """Return how ε was computed."""
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
    adjacency, one = result["adjacency"], subject(result)
    unprotected = "Nothing here protects the test images."
    choices = (
        "Other tries on the private data are not counted. If hyper-parameters were "
        "chosen with that data, or this run is the best of several on it, more was "
        "spent than this ε."
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
        f"The guarantee compares two data sets that differ in one {one}. "
        f"{str(_PROTECTS.get(adjacency, adjacency)).format(unit=one)}",
        unprotected,
        choices,
        "The folder private/ must stay secret for ever: with its secret seed anyone "
        "can remove the noise.",
        "Assumed is that the initial parameters do not depend on the private data, and "
        "that pseudo-random numbers (AES-256) are as good as random. The noise covers "
        "rounding.",
    ]


def protected(result: _Fields) -> str:
    """Return whom the guarantee protects, and how much less one with several images."""
    if unit(result) == "person":
        return _PER_PERSON
    text = "The guarantee is per image. A person with several images is protected less"
    of_sizes = result.get("epsilon_of_person") or {}
    known = [
        f"{simulated(value)} with {size} images" for size, value in of_sizes.items()
    ]
    return f"{text}: ε is {', '.join(known)}, at the same δ." if known else f"{text}."


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
    imports = "from dp_accounting import dp_event\nfrom dp_accounting.rdp import "
    imports += "RdpAccountant"
    made = """\
orders = [1 + tenth / 10 for tenth in range(1, 100)]
accountant = RdpAccountant([*orders, *range(11, 513)])"""
    composed, search = "run", result.get("search")
    if search:
        shape = search["shape"]
        shape = 'float("inf")' if shape is None else repr(shape)
        composed = "search"
        made = f"""\
search = dp_event.RepeatAndSelectDpEvent(run, {search["mean"]!r}, {shape})
{made}"""
    elif result["accountant"] != "rdp":
        # Zero-out has the ε of add-or-remove-one.
        replaced = result["adjacency"] == "replace-one"
        relation = "REPLACE_ONE" if replaced else "ADD_OR_REMOVE_ONE"
        imports = "from dp_accounting import NeighboringRelation, dp_event\n"
        imports += "from dp_accounting.pld import PLDAccountant"
        grid = accountants.finer_grid(Mechanism(**{k: result[k] for k in _MECHANISM}))
        grid = "" if grid is None else f", {grid!r}"
        made = f"accountant = PLDAccountant(NeighboringRelation.{relation}{grid})"
    counts = ""
    if (noise := result.get("class_counts_noise")) is not None:
        counts = f"accountant.compose(dp_event.GaussianDpEvent({noise!r}))"
        counts += "  # class counts\n"
    return f"""\
{imports}

noise = dp_event.GaussianDpEvent({result["noise_multiplier"]!r})
step = dp_event.PoissonSampledDpEvent({result["sample_rate"]!r}, noise)
run = dp_event.SelfComposedDpEvent(step, {result["steps"]!r})
{made}
accountant.compose({composed})
{counts}print(accountant.get_epsilon({result["delta"]!r}))"""


def factor(epsilon: float) -> str:
    """Return e^ε of the printed ε, rounded up."""
    most = math.exp(float(format_epsilon(epsilon))) if epsilon < 700 else None
    return simulated(most)


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


def few(config: _Fields, result: _Fields) -> str | None:
    """Return that so few examples may teach little; None if they are enough."""
    classes = len(config.get("classes") or ())
    if not classes:
        return None
    spent = Mechanism(**{name: result[name] for name in _MECHANISM})
    kinds = None if config.get("multi_label") else classes
    text = few_warning(spent, result["examples"], kinds, unit(result))
    return text and f"{text}."


def tuning(config: _Fields, result: _Fields) -> list[str]:
    """Return where the settings come from, and what choosing them spent."""
    if search := result.get("search"):
        return [
            "The settings were chosen by a private search: "
            f"{text(search['values'] or {})}. ε covers all of its runs."
        ]
    uncounted = (
        "If others were tried on these data, each try spent privacy that the ε of this "
        "run does not count."
    )
    if result.get("account"):
        uncounted += " The account of the data counts each try that was charged to it."
    if config.get("study"):
        return [uncounted]
    recipe = (config.get("recipe") or {}).get("name")
    if recipe is None:
        return [f"The program that trained it set the settings. {uncounted}"]
    return [
        f"The settings are those of the recipe {recipe}, with what the person who "
        f"trained it changed; no search is on record. {uncounted}"
    ]


_CONVERSIONS = {
    "upright-8-bit": "Each image was turned upright and brought to 8 bits per channel.",
}
_SIZES = {
    "given": "The person who trained it chose the size of the images.",
    "as they are": "All images had this size.",
    "default": "The size is a default of tanager's. It does not depend on the images.",
}


def how_read(config: _Fields) -> str:
    """Return how the files of a data set became images."""
    reading, chosen = config["reading"], config.get("automatic") or {}
    size = "default" if "image_size" in chosen else reading["size"]
    said = [
        f"Files: {reading['layout']}." if reading["layout"] else "",
        _CONVERSIONS.get(reading["conversion"], reading["conversion"]),
        _SIZES.get(size, size),
    ]
    if others := reading["not_read"]:
        said.append(f"Other files, which are not read, by ending: {text(others)}.")
    return " ".join(filter(None, said))


def day(date: str) -> str:
    """Return a date of ISO 8601 as people write it: 26 November 2026."""
    found = datetime.date.fromisoformat(date)
    return f"{found.day} {_MONTHS[found.month - 1]} {found.year}"


_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July"),
    *("August", "September", "October", "November", "December"),
)


def between(interval: _Fields) -> str:
    """Return a 95 % interval in percent."""
    if interval["low"] is None or interval["high"] is None:
        return "–"
    return f"{100 * interval['low']:.1f} to {100 * interval['high']:.1f} %"


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
