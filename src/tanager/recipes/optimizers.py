"""From a recipe's fields to the optax optimizer."""

import inspect

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from tanager import _validate as validate
from tanager.recipes.recipe import Recipe


_NAMES = """
adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb
lars lion novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop rprop
sgd sign_sgd signum sm3 yogi
"""
OPTIMIZERS = tuple(_NAMES.split())
"""Those of optax that need the gradient alone: not the loss, and no noise of theirs."""

DAMPENING = "dampening"
"""An option of SGD here that optax does not have."""


def optimizer(recipe: Recipe, steps: int) -> optax.GradientTransformation:
    """Return a recipe's optax optimizer, with its options and schedule.

    Weight decay is added to the gradient, before momentum, as in the Unlocking paper's
    pretraining; never to the loss, which is clipped. A schedule ends with the steps.

    Raises:
        ValueError: an unknown optimizer or option, a pair that does not work together,
            or a warm-up longer than the run.
    """
    validate.one_of(OPTIMIZERS, optimizer=recipe.optimizer)
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
        rule = f"does not work with options {options} and the "
        rule += f"{recipe.learning_rate_schedule} learning rate schedule ({error})"
        remedy = "change them, or take another optimizer"
        validate.refuse("optimizer", recipe.optimizer, rule, remedy)
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
    """
    validate.share(dampening=dampening)

    def update(updates: PyTree, state: PyTree, params: PyTree = None):
        del params
        scale = jnp.where(state, jnp.float32(1), jnp.float32(1 - dampening))
        scaled = jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), updates)
        return scaled, jnp.zeros_like(state)

    return optax.GradientTransformation(lambda params: jnp.bool_(True), update)


def schedule(recipe: Recipe, steps: int) -> float | optax.Schedule:
    """Return the learning rate, or the function from an update's number to it.

    `Recipe` says what each schedule does. The step schedule is that of the Unlocking
    paper's pretraining on CIFAR-100, warm-up and cosine of its pretraining on JFT
    (appendix C.3).
    """
    rate, warmup = recipe.learning_rate, recipe.warmup_steps
    shape = recipe.learning_rate_schedule
    if warmup >= steps:
        validate.refuse("warmup_steps", warmup, f"must be below the {steps} steps")
    if shape == "constant" and not warmup:
        return rate
    if shape == "cosine":
        main = optax.cosine_decay_schedule(rate, steps - warmup)
    elif shape == "step":
        ends = (-(-steps // 2) - warmup, -(-3 * steps // 4) - warmup)
        main = optax.piecewise_constant_schedule(rate, dict.fromkeys(ends, 0.1))
    else:
        main = optax.constant_schedule(rate)
    if warmup:
        rise = optax.linear_schedule(0.0, rate, warmup)
        main = optax.join_schedules([rise, main], [warmup])
    # optax divides by the number; JAX may be set to refuse integers there.
    return lambda count: main(jnp.asarray(count, jnp.float32))
