"""From a recipe's fields to the optax optimizer."""

import inspect

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, PyTree

from tanager import _validate as validate
from tanager.recipes.recipe import Recipe


_UNFIT = ("lbfgs", "noisy_sgd")
"""The first looks at the loss, which is private; the other has noise of its own."""

_STEP_FACTOR = 0.1
DAMPENING = "dampening"
"""An option of SGD here that optax does not have."""


def optimizer(recipe: Recipe, steps: int) -> optax.GradientTransformation:
    """Return the optax optimizer a recipe names, with its options and schedule.

    Weight decay is added to the gradient, before momentum, as in the Unlocking paper's
    pretraining; never to the loss, which is clipped.

    Args:
        recipe: gives the name, its options, the learning rate and its schedule.
        steps: of the run, which a schedule ends with.

    Raises:
        ValueError: optax has no such optimizer, it has no such option, cannot be made
            or updated with these, or the warm-up is longer than the run.
    """
    names = [
        name
        for name, value in vars(optax).items()
        if inspect.isfunction(value)
        and not name.startswith(("_", "scale_by_", *_UNFIT))
        and next(iter(inspect.signature(value).parameters), None) == "learning_rate"
    ]
    validate.one_of(sorted(names), optimizer=recipe.optimizer)
    make = getattr(optax, recipe.optimizer)
    options = list(inspect.signature(make).parameters)[1:]
    if recipe.optimizer == "sgd":
        options.append(DAMPENING)
    for name in recipe.optimizer_options:
        validate.one_of(options, optimizer_options=name)
    options = dict(recipe.optimizer_options)
    dampening = options.pop(DAMPENING, 0.0)
    rate = schedule(recipe, steps)
    try:
        made = make(rate, **options)
        jax.eval_shape(lambda: _try(made))
    except Exception as error:  # optax and Python raise nearly anything
        validate.refuse(
            "optimizer",
            recipe.optimizer,
            f"does not work with options {options} and the "
            f"{recipe.learning_rate_schedule} learning rate schedule ({error})",
            "change them, or take another optimizer",
        )
    if dampening and options.get("momentum"):
        made = optax.chain(dampened(dampening), made)
    if not recipe.weight_decay:
        return made
    return optax.chain(optax.add_decayed_weights(recipe.weight_decay), made)


def _try(made: optax.GradientTransformation) -> PyTree:
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    with jax.numpy_dtype_promotion("standard"):  # some of optax need it
        return made.update(params, made.init(params), params)


def dampened(dampening: float) -> optax.GradientTransformation:
    """Scale all gradients but the first by 1 − d, for momentum to sum up.

    So does PyTorch's SGD, whose grid of d the TAN paper searches (section 4.2); it does
    nothing there without momentum. optax has no such option.

    Raises:
        ValueError: d is not in [0, 1].
    """
    validate.not_negative(dampening=dampening)
    if dampening > 1:
        validate.refuse("dampening", dampening, "must be at most 1")

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        del params
        scale = jnp.where(state, jnp.float32(1), jnp.float32(1 - dampening))
        scaled = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates)
        return scaled, jnp.zeros_like(state)

    return optax.GradientTransformation(lambda params: jnp.bool_(True), update)


def schedule(recipe: Recipe, steps: int) -> float | optax.Schedule:
    """Return the learning rate, or the function from an update's number to it.

    | schedule | learning rate |
    |---|---|
    | constant | as it is |
    | step | a tenth from half of the steps on, a hundredth from three quarters on |
    | cosine | half a cosine wave from the full rate to 0 |

    The warm-up before it rises in a line from 0. The steps are those of the Unlocking
    paper's pretraining on CIFAR-100, warm-up and cosine those on JFT (appendix C.3).

    Raises:
        ValueError: the warm-up is longer than the run.
    """
    rate, warmup = recipe.learning_rate, recipe.warmup_steps
    shape = recipe.learning_rate_schedule
    if warmup >= steps:
        validate.refuse("warmup_steps", warmup, f"must be below the {steps} steps")
    if shape == "constant" and not warmup:
        return rate

    def factor(count: Array) -> Array:
        if shape == "step":
            late = jnp.where(4 * count >= 3 * steps, _STEP_FACTOR**2, _STEP_FACTOR)
            return jnp.where(2 * count >= steps, late, 1.0)
        if shape == "cosine":
            part = (count - warmup).astype(jnp.float32) / (steps - warmup)
            return (1 + jnp.cos(jnp.pi * part)) / 2
        return jnp.float32(1)

    def at(count: ArrayLike) -> Array:
        number = jnp.asarray(count)
        rise = number.astype(jnp.float32) / max(warmup, 1)
        return rate * jnp.where(number < warmup, rise, factor(number))

    return at
