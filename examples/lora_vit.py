"""LoRA on a small vision transformer: few trained parameters, a whole model."""

# %% [markdown]
# # LoRA on a small vision transformer
#
# A vision transformer learns the digits 0 to 4 without privacy. Then it is fine-tuned
# with DP-SGD on the digits 5 to 9, which it has never seen: its last layer, by LoRA,
# and all layers. A fourth model is trained from scratch. All four spend the same
# budget.
#
# Noise is added to every trained parameter, and its length grows with the root of
# their number. LoRA trains two thin matrices beside each linear layer of the blocks:
# it changes the whole network, and meets the noise of a few parameters.
#
# Everything is written to `runs/examples/lora_vit`. If you start this again, it finds
# the finished runs. To train again, delete the folder. Secrets come from the operating
# system. So accuracies differ from run to run, by several points with 179 test images.

# %%
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import tanager
from tanager import models
from tanager.data.augment import standardise


OUT = Path("runs/examples/lora_vit")
OUT.mkdir(parents=True, exist_ok=True)
DELTA = 1e-4

# Programs that were compiled once are kept for the next run.
jax.config.update("jax_compilation_cache_dir", str(OUT / "programs"))

# %% [markdown]
# ## The images
#
# Five digits teach a network little. So each public image is shown in four rotations,
# which makes 20 classes.

# %%
public = tanager.data.load("digits", classes=("0", "1", "2", "3", "4"))
sensitive = tanager.data.load("digits", classes=("5", "6", "7", "8", "9"))
turned_classes = tuple(f"{name} at {90 * k}°" for k in range(4) for name in "01234")


def turned(source):
    """Return all examples in four rotations, each of them with labels of its own."""
    images = np.stack([source[index]["image"] for index in range(len(source))])
    labels = np.array([source[index]["label"] for index in range(len(source))])
    return {
        "image": np.concatenate([np.rot90(images, k, (1, 2)) for k in range(4)]),
        "label": np.concatenate([labels + np.int32(5 * k) for k in range(4)]),
    }


turned_train, turned_test = turned(public.train), turned(public.test)

figure, rows = plt.subplots(2, 10, figsize=(8, 2), layout="constrained")
of_sensitive = [sensitive.train[index]["image"] for index in range(10)]
for row, name, images in (
    (rows[0], "public", turned_train["image"][::289]),
    (rows[1], "sensitive", of_sensitive),
):
    for axis, image in zip(row, images, strict=True):
        axis.imshow(image[..., 0], cmap="gray_r")
        axis.set_xticks([])
        axis.set_yticks([])
    row[0].set_ylabel(name)
figure.savefig(OUT / "images.png", dpi=150)

# %% [markdown]
# ## Pretraining, without privacy
#
# Two blocks of width 32 with four heads, on patches of 2 × 2 pixels. With
# `clip_norm=None` nothing is clipped and no noise is added. tanager warns about this.


# %%
def predict(model, example):
    """Return the logits of one example."""
    return model(standardise(example["image"], public.mean, public.std))


def loss(model, example):
    """Return the cross-entropy of one example."""
    logits = predict(model, example)
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


def transformer(classes):
    """Return a fresh vision transformer."""
    size = models.Variant(width=32, depth=2, heads=4)
    key = jax.random.key(0)
    return models.VisionTransformer(size, 2, classes, public.image_shape, key=key)


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="this run is NOT PRIVATE")
    pretrained = tanager.train(
        tanager.Problem(loss, transformer(20), turned_train),
        tanager.DPSGD(
            tanager.Mechanism(64 / 2880, noise_multiplier=0.0, steps=300),
            optax.adam(3e-3),
            delta=DELTA,
            clip_norm=None,
            ema_decay=0.98,
        ),
        tanager.Runtime(physical_batch_size=64),
        evaluate=tanager.Classification(predict, turned_test, turned_classes),
        evaluate_every=100,
        out=OUT / "pretraining",
    )

# %% [markdown]
# ## What is trained
#
# The new last layer starts from zero. `models.fine_tune` returns the model, and which
# of its leaves are trained. For `lora` it adds thin matrices beside the layers.

# %%
zero = jax.tree.map(jnp.zeros_like, models.Linear(32, 5, key=jax.random.key(0)))
network = eqx.tree_at(lambda model: model.head, pretrained.average, zero)


def start(way):
    """Return a model to be trained, and which leaves of it are trained."""
    if way == "from scratch":
        return transformer(5), True
    return models.fine_tune(network, way, key=jax.random.key(1), rank=4)


def count_trained(way):
    """Count the numbers that are trained."""
    model, trained = start(way)
    return models.count_parameters(eqx.filter(model, trained))


WAYS = ("last-layer", "lora", "all", "from scratch")
for way in WAYS:
    print(f"{way:<13}{count_trained(way):>8,} trained parameters")

# %% [markdown]
# ## Fine-tuning with DP-SGD
#
# ε = 3 at δ = 10⁻⁴, in four ways. The other leaves are constants of the step. They
# cost no gradient and no noise, and do not count in the norm that is clipped.
# `finish=models.merge` adds the thin matrices to the weights beside them. So the
# final model has the original architecture.

# %%
mechanism = tanager.calibrate(epsilon=3.0, delta=DELTA, sample_rate=0.5, steps=40)


def train(way):
    """Train in one of the four ways."""
    model, trained = start(way)
    return tanager.train(
        tanager.Problem(
            loss, model, sensitive.train, trainable=trained, finish=models.merge
        ),
        tanager.DPSGD(mechanism, optax.sgd(1.0), delta=DELTA, ema_decay=0.9),
        tanager.Runtime(physical_batch_size=128, progress=False),
        evaluate=tanager.Classification(predict, sensitive.test, sensitive.classes),
        evaluate_every=40,
        out=OUT / way.replace(" ", "-"),
    )


results = {way: train(way) for way in WAYS}
for way, result in results.items():
    accuracy = 100 * result.evaluation_ema.accuracy
    print(f"{way:<13}{accuracy:6.1f} % at ε = {result.epsilon:.2f}")

merged = results["lora"].average
assert jax.tree.structure(merged) == jax.tree.structure(network)
print(f"after LoRA: {models.count_parameters(merged):,} parameters, as before it")

# %%
figure, axis = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
for way, colour in zip(WAYS, ("#0072b2", "#d55e00", "#009e73", "#767676"), strict=True):
    place = count_trained(way), 100 * results[way].evaluation_ema.accuracy
    axis.plot(*place, "o", color=colour, markersize=8)
    axis.annotate(way, place, (0, 9), textcoords="offset points", ha="center")
axis.set_xscale("log")
axis.set_xlim(80, 80_000)
axis.set_ylim(30, 100)
axis.set_xlabel("trained parameters")
axis.set_ylabel("accuracy on digits 5 to 9 (%)")
axis.grid(alpha=0.4)
figure.savefig(OUT / "accuracy.png", dpi=150)

# %% [markdown]
# These are single runs with 179 test images, so differences of a few points are
# chance. In a network this small, training all layers is affordable. In a larger
# network, the thin matrices have a smaller share of the parameters, and cost
# relatively less. The last layer alone could use features computed once, as in the
# example `last_layer`.
