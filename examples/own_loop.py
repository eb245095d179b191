"""Coming from another library: your own Optax loop, made private part by part."""

# %% [markdown]
# # Coming from another library: your own loop
#
# | here | in Opacus | in JAX-Privacy |
# |---|---|---|
# | `calibrate` | `get_noise_multiplier` | `calibrate_dp_mechanism` |
# | `PoissonSampler` | `DPDataLoader` | `CyclicPoissonSampling` |
# | `physical_batch_size` | `BatchMemoryManager` | `split_and_pad_global_batch` |
# | `clipped_grad` | `GradSampleModule`, `DPOptimizer` | `clipped_grad` |
# | `gaussian_noise` | `DPOptimizer` | `gaussian_privatizer` |
# | `Ledger` | `PRVAccountant` | `PLDAccountant` |
#
# `docs/from_opacus.md` and `docs/from_jax_privacy.md` have more of them.
#
# `tanager.train` runs the loop for you. If you want your own, its parts work alone.
# Here they make a compiled private loop, with a schedule of the learning rate,
# evaluation, checkpoints by Orbax, and a ledger of what was spent.
#
# Everything is written to `runs/examples/own_loop`. If you start this again, it
# continues after the last step that was charged. To start over, delete the folder.

# %%
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import tanager


OUT = Path("runs/examples/own_loop")
OUT.mkdir(parents=True, exist_ok=True)
pixels, labels = load_digits(return_X_y=True)
images, labels = (pixels / 16).astype(np.float32), labels.astype(np.int32)
train = {"image": images[:1500], "label": labels[:1500]}
test = {"image": jnp.asarray(images[1500:]), "label": labels[1500:]}

# %% [markdown]
# ## The loss of one example


# %%
def predict(params, image):
    """Return the logits of one image, or of many."""
    hidden = jax.nn.relu(image @ params["body"] + params["bias"])
    return hidden @ params["head"]


def loss(params, example):
    """Return the cross-entropy of one example."""
    logits = predict(params, example["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


one, two = jax.random.split(jax.random.key(0))
params = {
    "body": jax.random.normal(one, (64, 32)) / 8,
    "bias": jnp.zeros(32),
    "head": jax.random.normal(two, (32, 10)) / 6,
}

# %% [markdown]
# ## The parts
#
# They share one mechanism. Noise is the first part of the optimizer. It charges the
# ledger before it draws the noise of a step, and keeps the number of the step in its
# state. The sum is divided by the expected batch size, which is public.
#
# The secret is new at each start. So no noise comes twice, and nothing secret is
# written.

# %%
mechanism = tanager.calibrate(epsilon=3.0, delta=1e-4, sample_rate=0.2, steps=60)
seed = tanager.Seed.from_os()
ledger = tanager.Ledger(OUT / "ledger.jsonl")
sampler = tanager.PoissonSampler(mechanism, len(train["label"]), seed)
grad_fn = tanager.clipped_grad(loss, clip_norm=1.0)
noise = tanager.GaussianNoise(mechanism, grad_fn.sensitivity, seed, params, ledger)
schedule = optax.warmup_cosine_decay_schedule(0.0, 2.0, 5, mechanism.steps)
optimizer = optax.chain(
    tanager.gaussian_noise(noise),
    optax.scale(1 / sampler.expected_batch_size),
    optax.sgd(schedule, momentum=0.5),
)

# %% [markdown]
# ## Two compiled functions
#
# A batch is as large as chance makes it, so it is added up in physical batches of one
# shape. A batch without examples is a step like any other: noise alone.


# %%
def add(total, params, rows, mask):
    """Add a physical batch to the sum of a step."""
    return noise.grid.add(total, grad_fn(params, rows, mask))


def update(params, state, total):
    """Add noise to the sum of a step, and update."""
    updates, state = optimizer.update(total, state, params)
    return optax.apply_updates(params, updates), state


add = jax.jit(add, compiler_options=tanager.compiler_options())
update = jax.jit(update)


def accuracy(params):
    """Return the accuracy on the test images, which are public."""
    classes = jnp.argmax(predict(params, test["image"]), axis=1)
    return float(np.mean(np.asarray(classes) == test["label"]))


# %% [markdown]
# ## The loop
#
# A checkpoint may be older than the ledger. The steps between were charged, and their
# noise may have been seen, so the loop continues after them.

# %%
state = optimizer.init(params)
curve = []
with ocp.CheckpointManager((OUT / "checkpoints").absolute()) as checkpoints:
    if checkpoints.latest_step() is not None:
        like = ocp.args.StandardRestore((params, state))
        params, state = checkpoints.restore(checkpoints.latest_step(), args=like)
        state = optax.tree.set(state, noise_step=noise.first_step)
    for step in range(noise.first_step, mechanism.steps):
        total = noise.zeros()
        for batch in sampler.batches(step, physical_batch_size=128):
            rows = {name: array[batch.indices] for name, array in train.items()}
            total = add(total, params, rows, batch.mask)
        params, state = update(params, state, total)
        if (step + 1) % 15 == 0:
            reached = accuracy(params)
            curve.append((ledger.epsilon(delta=1e-4), reached))
            checkpoints.save(step, args=ocp.args.StandardSave((params, state)))
jax.block_until_ready(params)  # a step is charged when it runs, which may be later
print(f"ε = {ledger.epsilon(delta=1e-4):.2f}, test accuracy {accuracy(params):.2f}")
ledger.close()

# %%
if curve:
    figure, axis = plt.subplots(figsize=(5, 3), layout="constrained")
    axis.plot(*zip(*curve, strict=True), marker="o", color="#0072b2")
    axis.set_xlabel("ε spent (δ = 1e-4)")
    axis.set_ylabel("accuracy on the test images")
    figure.savefig(OUT / "accuracy.png", dpi=100)
