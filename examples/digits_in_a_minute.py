"""Digits in a minute: plan a budget, train privately, read the report."""

# %% [markdown]
# # Digits in a minute
#
# A private classifier of 8 × 8 scanned digits, without a recipe: the data, a model, a
# budget, one call of `tanager.train`. The data come with scikit-learn, so nothing is
# downloaded.
#
# Sampling and noise come from a secret of the operating system. So the figures below
# differ from run to run, by about a point of accuracy. Everything is written to
# `runs/examples/digits_in_a_minute`. If you start this again, it finds the finished
# run and does not train twice. If it was killed, it resumes. To train again, delete
# the folder.

# %%
import json
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import tanager
from tanager.data.augment import standardise


OUT = Path("runs/examples/digits_in_a_minute")
OUT.mkdir(parents=True, exist_ok=True)

# %% [markdown]
# ## The data
#
# One training example is protected: one image with its label. The test images are
# taken to be public. Their accuracy is exact, without noise.

# %%
digits = tanager.data.load("digits")
print(f"{len(digits.train)} training and {len(digits.test)} test images")

figure, axes = plt.subplots(1, 10, figsize=(9, 1.3), layout="constrained")
for axis, index in zip(axes, range(10), strict=True):
    example = digits.train[index]
    axis.imshow(example["image"][..., 0], cmap="gray_r")
    axis.set_title(digits.classes[example["label"]])
    axis.axis("off")
figure.savefig(OUT / "images.png", dpi=150)

# %% [markdown]
# ## The model and the loss of one example
#
# A model takes one image, and a loss is written for one example. tanager does the
# batching. The first weights must not depend on the private data: here they come from
# a public key.

# %%
model = tanager.models.create(
    "small-cnn", classes=10, image_shape=digits.image_shape, key=jax.random.key(0)
)


def predict(model, example):
    """Return the logits of one example."""
    return model(standardise(example["image"], digits.mean, digits.std))


def loss(model, example):
    """Return the cross-entropy of one example."""
    logits = predict(model, example)
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


print(f"{tanager.models.count_parameters(model):,} parameters")

# %% [markdown]
# ## The budget
#
# ε = 3 at δ = 10⁻⁴, in 150 updates with batches of 512 examples on average.
# `calibrate` finds the noise multiplier. It returns the mechanism that the sampler,
# the noise and the accountant share.

# %%
mechanism = tanager.calibrate(
    epsilon=3.0, delta=1e-4, sample_rate=512 / len(digits.train), steps=150
)
print(mechanism)

# %% [markdown]
# ## Training

# %%
result = tanager.train(
    tanager.Problem(loss, model, digits.train),
    tanager.DPSGD(mechanism, optax.sgd(0.5), delta=1e-4, ema_decay=0.95),
    tanager.Runtime(physical_batch_size=128),
    evaluate=tanager.Classification(predict, digits.test, digits.classes),
    evaluate_every=10,
    out=OUT / "run",
)
print(f"ε = {result.epsilon:.3f} at δ = {result.delta:g} was spent")
print(f"test accuracy {100 * result.evaluation.accuracy:.1f} %,", end=" ")
print(f"of the average of parameters {100 * result.evaluation_ema.accuracy:.1f} %")
print(f"report: {result.out / 'report.html'}")

# %% [markdown]
# `report.html` states the guarantee in one sentence with its assumptions. It has
# curves, the configuration and the accuracy of each class. The lines of
# `metrics.jsonl` are public too. Here is accuracy against the ε spent so far.

# %%
lines = (OUT / "run/metrics.jsonl").read_text().splitlines()
lines = [json.loads(line) for line in lines]
figure, axis = plt.subplots(figsize=(5.5, 3.4), layout="constrained")
for name, label, colour in (
    ("test_accuracy", "last parameters", "#d55e00"),
    ("test_accuracy_ema", "average of parameters", "#0072b2"),
):
    heights = [100 * line[name] for line in lines]
    axis.plot([line["epsilon"] for line in lines], heights, color=colour, label=label)
axis.set_xlabel("ε spent (δ = 1e-4, PLD)")
axis.set_ylabel("accuracy on the test images (%)")
axis.grid(alpha=0.4)
axis.legend(loc="lower right")
figure.savefig(OUT / "accuracy.png", dpi=150)

# %% [markdown]
# ## What it gets wrong
#
# `result.average` is a model like the one that you gave. You may publish it: nobody
# learns more from it about one training image than (ε, δ) allows.

# %%
images = np.stack([digits.test[index]["image"] for index in range(len(digits.test))])
labels = np.array([digits.test[index]["label"] for index in range(len(digits.test))])
logits = jax.vmap(predict, (None, 0))(result.average, {"image": images})
predicted = np.argmax(logits, axis=1)
wrong = np.flatnonzero(predicted != labels)[:10]

figure, axes = plt.subplots(1, 10, figsize=(9, 1.5), layout="constrained")
for axis in axes:
    axis.axis("off")
for axis, index in zip(axes, wrong, strict=False):
    axis.imshow(images[index, ..., 0], cmap="gray_r")
    axis.set_title(f"{labels[index]}, seen\nas {predicted[index]}", fontsize=9)
figure.savefig(OUT / "wrong.png", dpi=150)
