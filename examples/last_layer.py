"""Fine-tune the last layer: pretrain without privacy, then features computed once."""

# %% [markdown]
# # A private last layer on features computed once
#
# A network learns some shapes without privacy, from images that anybody may see. Then
# it is frozen, and the features of every sensitive image are computed once. A new
# last layer is trained on them with DP-SGD. Each update is a small matrix product,
# and its noise falls on few numbers.
#
# Everything is written to `runs/examples/last_layer`. If you start this again, it
# finds the finished runs and the features. To train again, delete the folder. The
# images come from fixed seeds, sampling and noise from a secret of the operating
# system. So accuracies differ from run to run, by several points.

# %%
import warnings
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from PIL import Image, ImageDraw

import tanager
from tanager import models
from tanager.data.augment import standardise
from tanager.training.features import cache_features


OUT = Path("runs/examples/last_layer")
OUT.mkdir(parents=True, exist_ok=True)
DELTA = 1e-4

# Runs that differ in their noise alone share what is compiled for the first.
jax.config.update("jax_compilation_cache_dir", str(OUT / "programs"))

# %% [markdown]
# ## The images
#
# Shapes of any place, size, rotation and shade. Circles, squares, triangles and bars
# are public, so there can be any number of them. Crosses, rings and stars are
# sensitive, and there are 300 of each.

# %%
PUBLIC, SENSITIVE = ("circle", "square", "triangle", "bar"), ("cross", "ring", "star")
CORNERS = {
    "circle": (1.0,) * 24,
    "square": (1.0,) * 4,
    "triangle": (1.0,) * 3,
    "bar": (1.0, 0.37, 0.27, 0.27, 0.37, 1.0) * 2,
    "cross": (1.0, 1.0, 0.36) * 4,
    "ring": (1.0,) * 24,
    "star": (1.0, 0.4) * 5,
}  # how far from the middle each of them is


def draw(name, random):
    """Draw one image, uint8[16, 16, 1]: four times as large, and shrunk."""
    ground = random.uniform(0, 255)
    shade = (ground + random.uniform(90, 165)) % 255
    radius = random.uniform(16, 24)
    middle = random.uniform(radius + 2, 62 - radius, 2)
    turns = random.uniform() + np.arange(len(CORNERS[name])) / len(CORNERS[name])
    away = radius * np.array(CORNERS[name])
    around = np.stack([np.cos(2 * np.pi * turns), np.sin(2 * np.pi * turns)])
    corners = away[:, None] * around.T
    image = Image.new("L", (64, 64), int(ground))
    pen = ImageDraw.Draw(image)
    pen.polygon((middle + corners).flatten().tolist(), fill=int(shade))
    if name == "ring":
        pen.polygon((middle + 0.7 * corners).flatten().tolist(), fill=int(ground))
    small = np.asarray(image.resize((16, 16), Image.Resampling.BOX))
    noisy = small + random.normal(0, 8, small.shape)
    return noisy.clip(0, 255).astype(np.uint8)[..., None]


def examples(names, each, seed):
    """Draw `each` images of each shape."""
    random = np.random.default_rng(seed)
    return {
        "image": np.stack([draw(name, random) for name in names for _ in range(each)]),
        "label": np.repeat(np.arange(len(names), dtype=np.int32), each),
    }


public, public_test = examples(PUBLIC, 1000, 0), examples(PUBLIC, 100, 1)
sensitive, sensitive_test = examples(SENSITIVE, 300, 2), examples(SENSITIVE, 200, 3)

figure, rows = plt.subplots(7, 8, figsize=(4.2, 3.8), layout="constrained")
for row, name in zip(rows, PUBLIC + SENSITIVE, strict=True):
    random = np.random.default_rng(4)
    for axis in row:
        axis.imshow(draw(name, random)[..., 0], cmap="gray", vmin=0, vmax=255)
        axis.set_xticks([])
        axis.set_yticks([])
    row[0].set_ylabel(name, rotation=0, ha="right", va="center")
figure.savefig(OUT / "images.png", dpi=150)

# %% [markdown]
# ## The network
#
# Any Equinox module works. This one averages over positions before its last layer. So
# it has 32 features, wherever the shape is.


# %%
class Network(eqx.Module):
    """Three convolutions, each with ReLU and group norm; a mean; one linear layer."""

    convolutions: tuple[models.StandardisedConv, ...]
    norms: tuple[models.GroupNorm, ...]
    head: models.Linear

    def __init__(self, classes, *, key):
        one, two, three, last = jax.random.split(key, 4)
        self.convolutions = (
            models.StandardisedConv(1, 16, 3, key=one),
            models.StandardisedConv(16, 32, 3, stride=2, key=two),
            models.StandardisedConv(32, 32, 3, stride=2, key=three),
        )
        self.norms = tuple(models.GroupNorm(width, 4) for width in (16, 32, 32))
        self.head = models.Linear(32, classes, key=last)

    def features(self, image):
        """Return what the last layer sees of one image."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            image = norm(jax.nn.relu(convolution(image)))
        return jnp.mean(image, axis=(0, 1))

    def __call__(self, image):
        """Return the logits of one image."""
        return self.head(self.features(image))


def pixels(example):
    """Return the standardised image of an example."""
    return standardise(example["image"], (0.5,), (0.25,))


def predict(model, example):
    """Return the logits of one example."""
    return model(pixels(example))


def loss(model, example):
    """Return the cross-entropy of one example."""
    logits = predict(model, example)
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


# %% [markdown]
# ## Pretraining, without privacy
#
# With `clip_norm=None` nothing is clipped and no noise is added. The mechanism only
# says how batches are drawn. tanager warns about this, and the run's report says so.

# %%
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="this run is NOT PRIVATE")
    pretrained = tanager.train(
        tanager.Problem(loss, Network(len(PUBLIC), key=jax.random.key(0)), public),
        tanager.DPSGD(
            tanager.Mechanism(64 / 4000, noise_multiplier=0.0, steps=300),
            optax.sgd(0.1, momentum=0.9),
            delta=DELTA,
            clip_norm=None,
            ema_decay=0.98,
        ),
        tanager.Runtime(physical_batch_size=64),
        evaluate=tanager.Classification(predict, public_test, PUBLIC),
        evaluate_every=100,
        out=OUT / "pretraining",
    )

# %% [markdown]
# ## Features, once
#
# These are the inputs of the last layer, for every image. Features of sensitive
# images are as sensitive as the images, so only the owner can read their folder. The
# folder records their origin, and tanager refuses to use it with another network or
# other images.

# %%
network = pretrained.average


def features(model, example):
    """Return what the last layer sees of one example."""
    return model.features(pixels(example))


cached = cache_features(features, network, sensitive, OUT / "features/train")
tested = cache_features(features, network, sensitive_test, OUT / "features/test")
print(f"{len(cached)} training examples of {len(cached[0]['features'])} features")

# %% [markdown]
# ## The last layer, privately
#
# `tanager.train` gets only the layer, which starts from zero. `finish` puts the
# trained layer into the network. So the run's folder has a whole model for images.

# %%
zero = jax.tree.map(jnp.zeros_like, models.Linear(32, 3, key=jax.random.key(0)))


def predict_from_features(head, example):
    """Return the logits of one example whose features are known."""
    return head(example["features"])


def loss_from_features(head, example):
    """Return the cross-entropy of one example whose features are known."""
    logits = predict_from_features(head, example)
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


def train_last_layer(epsilon):
    """Train the last layer within a budget."""
    return tanager.train(
        tanager.Problem(
            loss_from_features,
            zero,
            cached,
            finish=lambda head: eqx.tree_at(lambda model: model.head, network, head),
        ),
        tanager.DPSGD(
            tanager.calibrate(epsilon=epsilon, delta=DELTA, sample_rate=0.5, steps=40),
            optax.sgd(2.0),
            delta=DELTA,
            ema_decay=0.9,
        ),
        tanager.Runtime(physical_batch_size=512, progress=False),
        evaluate=tanager.Classification(predict_from_features, tested, SENSITIVE),
        evaluate_every=40,
        out=OUT / f"last-layer-{epsilon:g}",
    )


last_layer = {epsilon: train_last_layer(epsilon) for epsilon in (0.25, 0.5, 1.0, 2.0)}
for epsilon, result in last_layer.items():
    print(f"ε = {epsilon:g}: {100 * result.evaluation_ema.accuracy:.1f} %")

# %% [markdown]
# ## What the pretraining gains
#
# The same network from scratch, on the same sensitive images, at two of these
# budgets.

# %%
fresh = Network(len(SENSITIVE), key=jax.random.key(0))


def train_from_scratch(epsilon):
    """Train the whole network within a budget."""
    return tanager.train(
        tanager.Problem(loss, fresh, sensitive),
        tanager.DPSGD(
            tanager.calibrate(epsilon=epsilon, delta=DELTA, sample_rate=0.5, steps=40),
            optax.sgd(0.5),
            delta=DELTA,
            ema_decay=0.9,
        ),
        tanager.Runtime(physical_batch_size=128, progress=False),
        evaluate=tanager.Classification(predict, sensitive_test, SENSITIVE),
        evaluate_every=40,
        out=OUT / f"from-scratch-{epsilon:g}",
    )


from_scratch = {epsilon: train_from_scratch(epsilon) for epsilon in (0.5, 2.0)}
for epsilon, result in from_scratch.items():
    print(f"ε = {epsilon:g}: {100 * result.evaluation_ema.accuracy:.1f} %")

# %%
figure, axis = plt.subplots(figsize=(5.5, 4.2), layout="constrained")
for runs, trained, label, colour, marker in (
    (last_layer, zero, "last layer of the pretrained network", "#0072b2", "o"),
    (from_scratch, fresh, "all layers, from scratch", "#767676", "D"),
):
    heights = [100 * result.evaluation_ema.accuracy for result in runs.values()]
    label = f"{label}: {models.count_parameters(trained):,} parameters"
    axis.plot(list(runs), heights, color=colour, marker=marker, label=label)
axis.axhline(100 / 3, color="black", linewidth=1, linestyle=":", label="guessing")
axis.set_xscale("log", base=2)
axis.set_xticks(list(last_layer), [f"{epsilon:g}" for epsilon in last_layer])
axis.set_ylim(25, 100)
axis.set_xlabel("ε (δ = 1e-4, PLD)")
axis.set_ylabel("accuracy on sensitive images (%)")
axis.grid(alpha=0.4)
axis.legend(loc="upper left", bbox_to_anchor=(0, -0.2), frameon=False)
figure.savefig(OUT / "accuracy.png", dpi=150)

# %% [markdown]
# The guarantee covers only the sensitive images. It assumes that the public images
# are public, and does not protect them. These are single runs: with the same budget,
# another run would differ by several points.
