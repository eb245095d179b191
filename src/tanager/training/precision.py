"""The precisions a model can be trained in, and what each means to JAX."""

import contextlib

import jax
import jax.numpy as jnp

from tanager import _validate as validate


PRECISIONS = {
    "float32": "highest",
    "tf32": "tensorfloat32",
    "bfloat16": "highest",
}
"""Names of precisions, and JAX's for the matrix products and convolutions of each.

bfloat16 images run a model in bfloat16 (see `tanager.models.layers`). Whatever the
precision, clipped gradients are added up in float32 and the noise is float32.
"""


def computing(precision: str) -> contextlib.AbstractContextManager:
    """Return the context in which everything must be traced, compiled and run."""
    validate.one_of(PRECISIONS, precision=precision)
    return jax.default_matmul_precision(PRECISIONS[precision])


def image_dtype(precision: str) -> jnp.dtype:
    """Return the dtype of the images that have a model compute in this precision."""
    return jnp.dtype(jnp.bfloat16 if precision == "bfloat16" else jnp.float32)
