"""A Flax model: clipped gradients, what is done to get them, private training."""

# %% [markdown]
# # A Flax model
#
# tanager needs a loss of one example and a pytree of parameters, written with any
# library. Here it is a convolutional network in Flax NNX. Its gradients are clipped,
# compared with their definition and explained layer by layer. Then it is trained.
#
# Needs `pip install flax`. The run is written to `runs/examples/flax_model`. If you
# start this again, it finds the run and does not train twice. To train again, delete
# the folder. The run's secret comes from the operating system, so the accuracy
# differs from run to run.

# %%
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import tanager
from tanager.data.augment import standardise


OUT = Path("runs/examples/flax_model")
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## The model
#
# It uses group normalisation, not batch normalisation. Statistics of a batch mix its
# examples, and clipping cannot bound the influence of one example then. tanager
# refuses such a loss by name.


# %%
class Network(nnx.Module):
    """Two convolutions with group norm, and a linear layer."""

    def __init__(self, *, rngs):
        self.first = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.first_norm = nnx.GroupNorm(16, num_groups=4, rngs=rngs)
        self.second = nnx.Conv(16, 32, kernel_size=(3, 3), strides=2, rngs=rngs)
        self.second_norm = nnx.GroupNorm(32, num_groups=4, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images):
        """Return the logits of a batch [B, 8, 8, 1]."""
        hidden = nnx.relu(self.first_norm(self.first(images)))
        hidden = nnx.relu(self.second_norm(self.second(hidden)))
        return self.head(hidden.reshape(hidden.shape[0], -1))


graph, params = nnx.split(Network(rngs=nnx.Rngs(0)), nnx.Param)

# %% [markdown]
# ## The loss of one example
#
# Flax's layers need a batch axis, so one example becomes a batch of one. `params` is
# a pytree of arrays. tanager sees nothing else of Flax.

# %%
digits = tanager.data.load("digits")


def predict(params, example):
    """Return the logits of one example."""
    image = standardise(example["image"], digits.mean, digits.std)
    return nnx.merge(graph, params)(image[None])[0]


def loss(params, example):
    """Return the cross-entropy of one example."""
    logits = predict(params, example)
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


# %% [markdown]
# ## A sum of clipped gradients
#
# `clipped_grad` returns a function of parameters and a batch. It sums the gradients of
# the examples, none of them longer than the clipping norm. A mask leaves out rows of
# padding.

# %%
rows = tanager.data.gather(digits.train, np.arange(64))
mask = np.arange(64) < 60
grad_fn = tanager.clipped_grad(loss, clip_norm=1.0)
out = grad_fn(params, rows, mask)
print(f"sensitivity {grad_fn.sensitivity}: what one example can change")

# %% [markdown]
# ## Comparison with the definition
#
# The definition needs every gradient by itself: `vmap(grad)`, with 64 times the
# memory of the parameters.

# %%
each = jax.vmap(jax.grad(loss), (None, 0))(params, rows)
squares = [
    jnp.sum(leaf**2, tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(each)
]
norms = jnp.sqrt(sum(squares))
factors = jnp.where(mask, jnp.minimum(1.0, 1.0 / norms), 0.0)
by_definition = jax.tree.map(lambda leaf: jnp.tensordot(factors, leaf, 1), each)

furthest = max(
    float(jnp.max(jnp.abs(ours - theirs)))
    for ours, theirs in zip(
        jax.tree.leaves(out.sum), jax.tree.leaves(by_definition), strict=True
    )
)
print(f"largest difference of any coordinate of the sum: {furthest:.1e}")
print(f"norms differ by {float(jnp.max(jnp.abs(out.norms - norms)[:60])):.1e} at most")
assert furthest < 1e-4

# %% [markdown]
# ## What tanager does instead
#
# `clipped_grad` reads the jaxpr of the loss and finds where each parameter meets the
# data. There it computes norm and sum, by the method that it measured to be fastest
# on this device. The milliseconds are from the machine that ran this.

# %%
print(grad_fn.explain(params, rows))

# %% [markdown]
# The norms before clipping are private. So is this picture: it depends on the
# examples without noise. These digits are public. With the first weights, every
# gradient is longer than C = 1, and clipping shortens all of them.

# %%
figure, axis = plt.subplots(figsize=(5.5, 3), layout="constrained")
axis.hist(np.asarray(out.norms[:60]), 20, color="#0072b2")
axis.axvline(1.0, color="black", linestyle="--", linewidth=1)
axis.annotate(
    "C = 1",
    (1.0, 0.97),
    (4, 0),
    xycoords=("data", "axes fraction"),
    textcoords="offset points",
    va="top",
)
axis.set_xlim(0)
axis.set_xlabel("gradient norm of an example, before clipping")
axis.set_ylabel("examples")
figure.savefig(OUT / "norms.png", dpi=150)

# %% [markdown]
# ## Private training
#
# The same loss and the same pytree.

# %%
result = tanager.train(
    tanager.Problem(loss, params, digits.train),
    tanager.DPSGD(
        tanager.calibrate(
            epsilon=3.0, delta=1e-4, sample_rate=512 / len(digits.train), steps=60
        ),
        optax.sgd(1.0),
        delta=1e-4,
        ema_decay=0.9,
    ),
    tanager.Runtime(physical_batch_size=128),
    evaluate=tanager.Classification(predict, digits.test, digits.classes),
    evaluate_every=10,
    out=OUT / "run",
)
print(f"ε = {result.epsilon:.2f} at δ = {result.delta:g},", end=" ")
print(f"test accuracy {100 * result.evaluation_ema.accuracy:.1f} %")

# %% [markdown]
# The result is a pytree like the one that went in. Merged with the graph it is a Flax
# model again.

# %%
network = nnx.merge(graph, result.average)
images = np.stack([digits.test[index]["image"] for index in range(10)])
logits = network(jnp.asarray(images, jnp.float32) / 127.5 - 1)

figure, axes = plt.subplots(1, 10, figsize=(8, 1.2), layout="constrained")
for axis, image, seen in zip(axes, images, np.argmax(logits, axis=1), strict=True):
    axis.imshow(image[..., 0], cmap="gray_r")
    axis.set_title(f"{seen}")
    axis.axis("off")
figure.savefig(OUT / "predictions.png", dpi=150)
