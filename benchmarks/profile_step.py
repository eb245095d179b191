"""Say where the time of one plain SGD step goes, for a named model.

    python benchmarks/profile_step.py [--model wrn-16-4] [--batch 32] [--rounds 15]
        [--as-jax-comes]

Each convolution of the model is timed alone, compiled as tanager does for the whole
batch: forward, gradient in the input, gradient in the weight. The whole step, the
forward pass and the forward pass with the gradient in the image are timed too; what a
pass takes beyond its convolutions is the norms, the activations and the update. Times
are medians in milliseconds; all parts are timed in turn, so that a machine that drifts
slows them alike. "Cores" is processor time over wall time. With --as-jax-comes nothing
is asked of XLA (`tanager.compiler_options()`).
"""

import argparse
import collections
import time
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import tanager
from tanager.models import zoo


PASSES = ("forward", "input gradient", "weight gradient")
_LEARNING_RATE = np.float32(0.1)
_WARM_UP = 3
_CLASSES = 10


def _convolutions(jaxpr: Any) -> Iterator[tuple[tuple, tuple, tuple]]:
    """Yield shapes and options of each convolution, also inside nested functions."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            image, kernel = (variable.aval.shape for variable in equation.invars)
            options = {
                name: equation.params[name]
                for name in ("window_strides", "padding", "dimension_numbers")
            }
            yield image, kernel, tuple(options.items())
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from _convolutions(inner.jaxpr)


def _compile(asked: dict, function: Callable, *arguments: Any) -> Callable[[], Any]:
    jitted = jax.jit(function, compiler_options=asked)
    compiled = jitted.lower(*arguments).compile()
    return lambda: compiled(*arguments)


def _convolution_passes(
    asked: dict, convolution: tuple[tuple, tuple, tuple], batch: int
) -> list[Callable[[], Any]]:
    """Return the three passes of a convolution over `batch` images."""
    image, kernel, options = convolution

    def convolve(x, w):
        return lax.conv_general_dilated(x, w, **dict(options))

    x = jnp.ones((batch, *image[1:]), jnp.float32)
    w = jnp.ones(kernel, jnp.float32)
    dy = convolve(x, w)

    def to_input(dy, w):
        return jax.linear_transpose(lambda x: convolve(x, w), x)(dy)

    def to_weight(dy, x):
        return jax.linear_transpose(lambda w: convolve(x, w), w)(dy)

    return [
        _compile(asked, convolve, x, w),
        _compile(asked, to_input, dy, w),
        _compile(asked, to_weight, dy, x),
    ]


def _whole_passes(
    asked: dict, model: Any, images: jax.Array
) -> list[Callable[[], Any]]:
    """Return the forward pass, it with the gradient in the images, and the step."""
    labels = jnp.arange(len(images)) % _CLASSES
    parameters, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters, images):
        logits = jax.vmap(eqx.combine(parameters, static))(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    def step(parameters, images):
        gradients = jax.grad(loss)(parameters, images)
        return jax.tree.map(lambda p, g: p - _LEARNING_RATE * g, parameters, gradients)

    functions = (loss, jax.value_and_grad(loss, argnums=1), step)
    return [_compile(asked, function, parameters, images) for function in functions]


def _measure(
    passes: list[Callable[[], Any]], rounds: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return each pass's median milliseconds and the cores it kept busy."""
    wall = np.zeros((rounds, len(passes)))
    cores = np.zeros((rounds, len(passes)))
    for turn in range(-_WARM_UP, rounds):
        for place, run in enumerate(passes):
            processor, start = time.process_time(), time.perf_counter()
            jax.block_until_ready(run())
            seconds = time.perf_counter() - start
            if turn >= 0:
                wall[turn, place] = 1e3 * seconds
                cores[turn, place] = (time.process_time() - processor) / seconds
    return np.median(wall, axis=0), np.median(cores, axis=0)


def _name(convolution: tuple[tuple, tuple, tuple]) -> str:
    image, kernel, options = convolution
    height, width, channels_in = image[1:]
    stride = dict(options)["window_strides"][0]
    kernel_size, channels_out = kernel[0], kernel[-1]
    return (
        f"{height}×{width}, {channels_in} → {channels_out},"
        f" {kernel_size}×{kernel_size}, stride {stride}"
    )


def profile(name: str, side: int, batch: int, rounds: int, asked: dict) -> None:
    """Print the table of one model, in Markdown."""
    key = jax.random.key(0)
    shape = (side, side, 3)
    model = zoo.create(name, classes=_CLASSES, image_shape=shape, key=key)
    images = jax.random.normal(key, (batch, *shape), jnp.float32)
    closed = jax.make_jaxpr(model)(images[0])
    counts = collections.Counter(_convolutions(closed.jaxpr))
    runs = _whole_passes(asked, model, images)
    for convolution in counts:
        runs += _convolution_passes(asked, convolution, batch)
    milliseconds, cores = _measure(runs, rounds)
    forward, both, step = milliseconds[:3]
    whole = np.array([forward, both - forward, step - both])
    parts = milliseconds[3:].reshape(-1, 3)
    busy = cores[3:].reshape(-1, 3)
    times = np.array(list(counts.values()))

    print(
        f"{name}, batch {batch}: {step:.0f} ms, {1e3 * batch / step:.1f} examples/s\n"
    )
    print(f"| part | times | {' | '.join(PASSES)} | cores | % of the step |")
    print("|---|---|---|---|---|---|---|")

    def row(part: str, count: Any, cells: np.ndarray, kept_busy: str = "") -> None:
        share = 100 * cells.sum() / step
        numbers = " | ".join(f"{cell:.1f}" for cell in cells)
        print(f"| {part} | {count} | {numbers} | {kept_busy} | {share:.0f} |")

    for convolution, count, part, used in zip(counts, times, parts, busy, strict=True):
        kept_busy = ", ".join(f"{cell:.1f}" for cell in used)
        row(_name(convolution), count, count * part, kept_busy)
    convolutions = times @ parts
    row("norms, activations, head, update", "", whole - convolutions)
    row("whole", "", whole)


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(
        description="Say where the time of one plain SGD step goes."
    )
    parser.add_argument("--model", default="wrn-16-4", help="a name of the model zoo")
    parser.add_argument("--side", type=int, default=32, help="pixels per side")
    parser.add_argument("--batch", type=int, default=32, help="examples per step")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds")
    parser.add_argument("--as-jax-comes", action="store_true")
    options = parser.parse_args()
    asked = {} if options.as_jax_comes else tanager.compiler_options()
    profile(options.model, options.side, options.batch, options.rounds, asked)


if __name__ == "__main__":
    main()
