"""`tanager audit`: what an attack on the real training code proves about its ε."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from tanager import _validate as validate
from tanager import recipes
from tanager._files import json_text, write_json
from tanager.commands import flags


if TYPE_CHECKING:
    from tanager.audit.white_box import WhiteBox
    from tanager.recipes.runner import Prepared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What an audit does with a recipe."""

    method: Literal["white-box"] = "white-box"
    """The attack: gradient canaries in a run whose every update is seen."""

    canaries: int = 2000
    """How many; about half of them join the data."""

    confidence: float = 0.95
    """That the bound is below the true ε."""

    knows_sample: bool = False
    """The attacker also knows who was sampled: tells much from few steps, and takes it
    as claimed that sampling is Poisson."""

    audited_steps: int | None = None
    """Steps to run; all of them by default. What fewer prove of the noise is put into
    the whole run."""

    audited_examples: int = 256
    """How many of the training examples the canaries join. The sample rate is that of
    the whole recipe."""

    json: bool = False
    """Print one JSON object and nothing else."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; `arguments` are the words after `tanager audit`.

    Returns:
        1 where the bound is above the claim, else 0.
    """
    words = list(arguments)
    name = words.pop(0) if words and not words[0].startswith("-") else "digits"
    recipe, options = flags.parse("audit", recipes.get(name), words, Options)
    validate.whole(audited_examples=options.audited_examples, at_least=1)
    if recipe.non_private:
        validate.refuse(
            "non_private", True, "claims nothing that could be audited", "leave it out"
        )

    # JAX is imported from here on: the command line was fine.
    from tanager.recipes import runner
    from tanager.training.precision import computing

    out = Path(recipe.out or f"runs/{name}-audit")
    prepared = runner.prepare(name, recipe, flags.typed(words))
    screen = Console(stderr=True, highlight=False)
    mechanism = prepared.budget.mechanism
    screen.print(
        f"{name}: claimed is ε = {prepared.budget.epsilon:.4g} at δ = "
        f"{prepared.budget.delta:g}, by sample rate {mechanism.sample_rate:.4g}, noise "
        f"multiplier {mechanism.noise_multiplier:.4g} and {mechanism.steps} steps"
    )
    with computing(recipe.precision):
        found = _audit(prepared, options, out)
    content = _content(name, options, found)
    write_json(out / "audit.json", content)
    if options.json:
        print(json_text(content, indent=2))
    else:
        _print(content, out)
    return int(found.violated)


def _audit(prepared: "Prepared", options: Options, out: Path) -> "WhiteBox":
    import numpy as np

    from tanager.audit.white_box import audit_white_box
    from tanager.data import subset
    from tanager.recipes import runner, tasks
    from tanager.recipes.optimizers import optimizer
    from tanager.training.run_folder import RunFolder

    recipe, dataset = prepared.recipe, prepared.dataset
    mechanism = prepared.budget.mechanism
    count = min(options.audited_examples, len(dataset.train))
    dataset = dataclasses.replace(
        dataset, train=subset(dataset.train, np.arange(count))
    )
    folder = out / "run"
    secret = RunFolder(folder).seed(recipe.seed)
    task = tasks.make(recipe, dataset, secret, folder, progress=not options.json)
    return audit_white_box(
        task.loss,
        task.model,
        task.train,
        mechanism,
        delta=prepared.budget.delta,
        optimizer=optimizer(recipe, mechanism.steps),
        canaries=options.canaries,
        confidence=options.confidence,
        augment=task.augment,
        trainable=task.trainable,
        knows_sample=options.knows_sample,
        steps=options.audited_steps,
        out=folder,
        progress=not options.json,
        **runner.train_options(recipe),
    )


def _content(name: str, options: Options, found: "WhiteBox") -> dict[str, Any]:
    from tanager.audit.bounds import highest_advantage

    return {
        "recipe": name,
        "method": options.method,
        "claimed_epsilon": found.claimed_epsilon,
        "delta": found.delta,
        "epsilon_lower_bound": found.epsilon_lower_bound,
        "confidence": found.confidence,
        "violated": found.violated,
        "models": 1,
        "canaries": options.canaries,
        "knows_sample": options.knows_sample,
        "noise_multiplier_not_refuted": found.noise_multiplier,
        "auc": found.audit.auc,
        "advantage": found.audit.advantage,
        "highest_advantage": highest_advantage(found.claimed_epsilon, found.delta),
        "threshold": found.audit.threshold,
        "errors": found.audit.errors._asdict(),
        "scores": {
            "inside": found.inside.tolist(),
            "outside": found.outside.tolist(),
        },
    }


def _print(content: dict[str, Any], out: Path) -> None:
    console = Console(highlight=False)
    share = content["epsilon_lower_bound"] / content["claimed_epsilon"]
    console.print(
        f"an attacker who sees every update shows, with confidence "
        f"{content['confidence']:g}, that ε is at least "
        f"{content['epsilon_lower_bound']:.4g}: {100 * share:.0f} % of what is claimed"
    )
    if content["violated"]:
        console.print(
            "VIOLATED: the bound is above the claim. Training gives away more than it "
            "says; or this is one of the few audits that err, as its confidence says: "
            "repeat it with another seed",
            style="bold red",
        )
    else:
        console.print("nothing here contradicts the claim")
    console.print(
        f"canaries told apart with AUC {content['auc']:.3f}; the noise multiplier may "
        f"be as large as {content['noise_multiplier_not_refuted']:.4g}"
    )
    console.print(f"all of it: {out}/audit.json", soft_wrap=True)
