"""What is measured: a model, its loss for one example, and synthetic examples."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, PyTree

from tanager import _validate as validate
from tanager import models
from tanager.parallel.layout import Layout
from tanager.privacy.mechanism import Mechanism
from tanager.sampling import PhysicalBatch
from tanager.seed import Seed
from tanager.training import precision as precisions
from tanager.training.problem import DPSGD, Problem, Runtime
from tanager.training.state import State
from tanager.training.step import Step


SGD = "sgd"
"""The name of training without privacy, among those of clipping strategies."""

_EXAMPLES = 50_000
_STEPS = 1_000_000
_LEARNING_RATE = 0.1
_SEED = 0


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model under a classification loss, and batches of noise to train it on.

    Attributes:
        model: a name that `tanager.models.create` knows.
        image_shape: (height, width, channels), or (features,).
        classes: number of classes.
        views: K augmented views of each example; 1 for the example alone.
        precision: one of `tanager.training.precision.PRECISIONS`.
        clip_norm: the clipping norm C.
    """

    model: str
    image_shape: tuple[int, ...]
    classes: int = 10
    views: int = 1
    precision: str = "float32"
    clip_norm: float = 1.0

    def __post_init__(self):
        validate.one_of(precisions.PRECISIONS, precision=self.precision)
        validate.whole(views=self.views, at_least=1)
        validate.clipping_norm(self.clip_norm)
        _ = self.param_shapes

    def computing(self) -> contextlib.AbstractContextManager:
        """Return the context in which everything must be traced, compiled and run."""
        return precisions.computing(self.precision)

    def params(self) -> PyTree:
        """Return initial parameters, all of them trained; the same on every call."""
        return models.create(
            self.model,
            classes=self.classes,
            image_shape=self.image_shape,
            key=jax.random.key(_SEED),
        )

    @functools.cached_property
    def param_shapes(self) -> PyTree:
        """Shapes and dtypes of `params`, found without computing anything."""
        return eqx.filter_eval_shape(self.params)

    def batch(self, rows: int) -> dict[str, Array]:
        """Return the examples of a physical batch, from a fixed NumPy seed."""
        generator = np.random.default_rng(_SEED)
        shapes = self.batch_shapes(rows)
        image, label = shapes["image"], shapes["label"]
        pixels = generator.standard_normal(image.shape, np.float32)
        labels = generator.integers(self.classes, size=label.shape, dtype=np.int32)
        return {"image": jnp.asarray(pixels, image.dtype), "label": jnp.asarray(labels)}

    def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of a physical batch."""
        axes = (rows,) if self.views == 1 else (rows, self.views)
        dtype = precisions.image_dtype(self.precision)
        return {
            "image": jax.ShapeDtypeStruct((*axes, *self.image_shape), dtype),
            "label": jax.ShapeDtypeStruct(axes, jnp.int32),
        }

    def step(
        self,
        strategy: str,
        layout: Layout | None = None,
        *,
        sample_rate: float = 0.01,
        examples: int = _EXAMPLES,
        in_memory: bool = False,
    ) -> Step:
        """Return the step of training, as `tanager train` runs it.

        `strategy` is one of clipping, maybe with ``":low"`` for its memory; or
        ``"sgd"``: nothing is clipped and no noise is added. Logical batches are drawn
        from `examples` at `sample_rate`; see `Step` for `in_memory`.
        """
        private = strategy != SGD
        strategy, _, memory = strategy.partition(":")
        problem = Problem(self.loss, self.param_shapes, None)
        algorithm = DPSGD(
            Mechanism(sample_rate, 1.0 if private else 0.0, _STEPS),
            self.optimizer,
            delta=1 / _EXAMPLES,
            clip_norm=self.clip_norm if private else None,
            ema_decay=0.999,
        )
        runtime = Runtime(
            strategy=strategy if private else "auto", memory=memory or "default"
        )
        seed = Seed.from_int(_SEED)
        return Step(problem, algorithm, runtime, seed, examples, layout, in_memory)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """Plain SGD, of private and of ordinary training alike."""
        return optax.sgd(_LEARNING_RATE)

    def loss(self, params: PyTree, example: Any) -> Array:
        """Return the loss of one example, averaged over its views."""
        if self.views == 1:
            return _loss(params, example)
        return jnp.mean(jax.vmap(_loss, (None, 0))(params, example))


def logical_step(
    step: Step, state: State, batches: Iterable[PhysicalBatch], number: int
) -> State:
    """Make the update of a logical batch, wait for it, and return the state after."""
    total, key = step.zero(), step.augmentation_key(number)
    for batch in batches:
        total = step.accumulate(state.params, total, batch, key)
    drawn = step.draw(number)
    state, *rest = step.apply(state, total, drawn, np.int32(number))
    jax.block_until_ready((state, rest))
    return state


def _loss(model: Any, example: Any) -> Array:
    logits = model(example["image"])
    # The softmax of bfloat16 logits is taken in float32, as it should be in training.
    return optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), example["label"]
    )
