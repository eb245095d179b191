"""From a recipe's fields to the optax optimizer."""

import inspect

import jax.numpy as jnp
import optax

from tanager import _validate as validate
from tanager.recipes.recipe import Recipe


_STEP_FACTOR = 0.1


def optimizer(recipe: Recipe, steps: int) -> optax.GradientTransformation:
    """Return the optax optimizer a recipe names, with its options and schedule.

    Weight decay is added to the gradient, before momentum, as in the Unlocking paper's
    pretraining; never to the loss, which is clipped.

    Args:
        recipe: gives the name, its options, the learning rate and its schedule.
        steps: of the run, which a schedule ends with.

    Raises:
        ValueError: optax has no such optimizer, it has no such option, or the warm-up
            is longer than the run.
    """
    names = [
        name
        for name, value in vars(optax).items()
        if inspect.isfunction(value)
        and not name.startswith(("_", "scale_by_"))
        and next(iter(inspect.signature(value).parameters), None) == "learning_rate"
    ]
    validate.one_of(sorted(names), optimizer=recipe.optimizer)
    make = getattr(optax, recipe.optimizer)
    options = list(inspect.signature(make).parameters)[1:]
    for name in recipe.optimizer_options:
        validate.one_of(options, optimizer_options=name)
    made = make(schedule(recipe, steps), **recipe.optimizer_options)
    if not recipe.weight_decay:
        return made
    return optax.chain(optax.add_decayed_weights(recipe.weight_decay), made)


def schedule(recipe: Recipe, steps: int) -> float | optax.Schedule:
    """Return the learning rate, or the function from an update's number to it.

    | schedule | learning rate |
    |---|---|
    | constant | as it is |
    | step | a tenth from half of the steps on, a hundredth from three quarters on |
    | cosine | half a cosine wave from the full rate to 0 |

    After the warm-up, which rises in a line from 0; the waves and steps of the others
    count from the start of the run, as in the Unlocking paper, appendix C.3.

    Raises:
        ValueError: the warm-up is longer than the run.
    """
    rate, warmup = recipe.learning_rate, recipe.warmup_steps
    if warmup >= steps:
        validate.refuse("warmup_steps", warmup, f"must be below the {steps} steps")
    if recipe.learning_rate_schedule == "constant" and not warmup:
        return rate
    if recipe.learning_rate_schedule == "step":
        at = {steps // 2: _STEP_FACTOR, 3 * steps // 4: _STEP_FACTOR}
        after = optax.piecewise_constant_schedule(rate, at)
    elif recipe.learning_rate_schedule == "cosine":
        wave = optax.cosine_decay_schedule(rate, steps - warmup)
        after = lambda count: wave(count - warmup)  # noqa: E731
    else:
        after = optax.constant_schedule(rate)
    if not warmup:
        return after
    rise = optax.linear_schedule(0.0, rate, warmup)
    return lambda count: jnp.where(jnp.less(count, warmup), rise(count), after(count))
