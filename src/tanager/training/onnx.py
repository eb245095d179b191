"""Write a model in ONNX, and check it against JAX.

jax2onnx converts what JAX traces of a model. It is given the jaxpr of one example under
`vmap`. There, what depends on weights alone is computed (weight standardisation, for
one), calls are opened, and padding is concatenation, which it converts for any number
of examples.
"""

import importlib
import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tanager import _validate as validate
from tanager._reading import reason
from tanager.clipping.analysis.jaxprs import OPENED, body_of, evaluate, interpret


INPUT, OUTPUT = "examples", "logits"
TOLERANCE = 1e-4  # of logits, relative to the largest where that is above 1
_CHECKED = 3  # examples


def packages() -> tuple[Any, ...]:
    """Return jax2onnx and onnxruntime; refuse to go on without them."""
    try:
        return tuple(map(importlib.import_module, ("jax2onnx", "onnxruntime")))
    except ImportError as error:
        rule = f"needs a package that is not installed ({error.name})"
        remedy = "pip install 'tanager-dp[onnx]'"
        return validate.refuse("format", "onnx", rule, remedy)


def write(model: Any, shape: tuple[int, ...], file: Path, name: str) -> float:
    """Write a model of one example as ONNX, for a batch of any size.

    Args:
        model: from float32 of `shape` to logits, without keys.
        shape: of one preprocessed image, or of features.
        file: to write; its input is `INPUT`, float32[n, *shape], its output `OUTPUT`.
        name: of the architecture, for messages.

    Returns:
        The largest difference of a logit from JAX, on random examples.

    Raises:
        ValueError: packages are missing, the model cannot be converted, or its logits
            differ by more than `TOLERANCE`.
    """
    jax2onnx, onnxruntime = packages()
    example = jax.ShapeDtypeStruct(shape, jnp.float32)
    traced = jax.make_jaxpr(model)(example)
    simple = jax.make_jaxpr(
        lambda x: interpret(traced.jaxpr, traced.consts, [x], _rule)
    )
    batched = jax.vmap(jex.jaxpr_as_fun(simple(example)))
    remedy = "export it as tanager"
    logging.getLogger("onnx_ir").setLevel(logging.ERROR)
    try:
        made = jax2onnx.to_onnx(
            lambda examples: batched(examples)[0],
            [("n", *shape)],
            model_name="tanager",
            input_names=[INPUT],
            output_names=[OUTPUT],
        )
        content = made.SerializeToString()
        session = onnxruntime.InferenceSession(
            content, providers=["CPUExecutionProvider"]
        )
        drawn = np.random.default_rng(0).normal(size=(_CHECKED, *shape))
        examples = drawn.astype(np.float32)
        (found,) = session.run([OUTPUT], {INPUT: examples})
    except Exception as error:  # the converter raises nearly anything
        if os.environ.get("TANAGER_TRACEBACK"):
            raise
        rule = f"cannot be written for {name} ({reason(error)})"
        validate.refuse("format", "onnx", rule, remedy)
    expected = np.asarray(jax.jit(jax.vmap(model))(examples))
    difference = float(np.abs(np.asarray(found) - expected).max())
    if not difference <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
        rule = f"gives logits of {name} that differ by {difference:.2g} from JAX"
        validate.refuse("format", "onnx", rule, remedy)
    file.write_bytes(content)
    return difference


def _rule(equation: jex.JaxprEqn, values: list[Any]) -> list[Any]:
    """Evaluate an equation as the converter needs it; now, where it is constant."""
    name = equation.primitive.name
    if name in OPENED:
        return interpret(*body_of(equation), values, _rule)
    if not any(isinstance(value, Tracer) for value in values):
        with jax.ensure_compile_time_eval():
            return evaluate(equation, values)
    if name == "pad":
        image, fill = values
        return [_padded(image, fill, equation.params["padding_config"])]
    return evaluate(equation, values)


def _padded(image: Any, fill: Any, edges: Any) -> Any:
    for axis, (before, after, between) in enumerate(edges):
        if between or min(before, after) < 0:
            raise NotImplementedError("padding between rows, or cropping by padding")
        parts = [image]
        for count, place in ((before, 0), (after, 2)):
            if count:  # the converter does not take empty parts
                shape = (*image.shape[:axis], count, *image.shape[axis + 1 :])
                parts.insert(place, jnp.full(shape, fill, image.dtype))
        image = jnp.concatenate(parts, axis) if len(parts) > 1 else image
    return image
