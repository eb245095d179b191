"""A white-box audit of a correct training, and of one with a planted bug."""

# %% [markdown]
# # Audit it
#
# An ε is a theorem about an algorithm. An attack can show that the code is another
# algorithm. Here the strongest known attack runs against `tanager.train`, and then
# against a version with a bug: its noise has half the standard deviation it claims. A
# lower bound above the claim proves, at a stated confidence, that something is wrong.
#
# The audits are seeded: on one machine they always find the same. Pictures go to
# `runs/examples/audit_it`. If you start this again, everything is computed again.

# %%
import contextlib
import dataclasses
from pathlib import Path
from unittest import mock

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax

import tanager
from tanager.audit.replay import replay
from tanager.audit.white_box import audit_white_box
from tanager.data.augment import standardise


OUT = Path("runs/examples/audit_it")
OUT.mkdir(parents=True, exist_ok=True)

# All audits compile the same programs, except the noise.
jax.config.update("jax_compilation_cache_dir", str(OUT / "programs"))

# %% [markdown]
# ## What is claimed
#
# 40 updates of a linear model on 200 digits. The bound tests noise, clipping,
# sampling and their composition, not the model. So few images and a small model are
# enough.

# %%
digits = tanager.data.load("digits", train_examples=200)
model = tanager.models.create(
    "linear", classes=10, image_shape=digits.image_shape, key=jax.random.key(0)
)


def loss(model, example):
    """Return the cross-entropy of one example."""
    image = standardise(example["image"], digits.mean, digits.std)
    logits = model(image)
    return optax.softmax_cross_entropy_with_integer_labels(logits, example["label"])


claimed = tanager.Mechanism(sample_rate=0.2, noise_multiplier=1.5, steps=40)
DELTA = 1e-3
print(f"claimed: ε = {tanager.epsilon(claimed, DELTA):.2f} at δ = {DELTA:g}")

# %% [markdown]
# ## The attack
#
# Among the images are 3000 canaries, each with a gradient on its own coordinate.
# Coins decide which canaries are in the data. The attacker sees every noisy update,
# and computes from the coordinate of a canary how likely it was in. The right guesses
# give a lower bound on ε.


# %%
problem = tanager.Problem(loss, model, digits.train)
algorithm = tanager.DPSGD(claimed, optax.sgd(0.1), delta=DELTA)


def audit(seed=1):
    """Attack one run of `tanager.train`."""
    return audit_white_box(problem, algorithm, canaries=3000, seed=seed)


right = audit()
print(f"at least ε = {right.epsilon_lower_bound:.2f}, with confidence 95 %")
print(f"claimed  ε = {right.claimed_epsilon:.2f}; violated: {right.violated}")

# %% [markdown]
# A bound below the claim shows that this attack found nothing. It does not prove that
# the training is private. But it is near the claim, so this attack leaves little room
# for a bug.
#
# ## A bug
#
# A change loses a factor of the noise: the added noise has half of the standard
# deviation that the mechanism states. Nothing else changes. The model trains even
# better than before, and the ledger and the report claim the same ε as before.


# %%
@contextlib.contextmanager
def noise_times(factor):
    """Plant the bug for the time of a block."""
    init = tanager.GaussianNoise.__init__

    def wrong(self, mechanism, *arguments):
        sigma = factor * mechanism.noise_multiplier
        init(self, dataclasses.replace(mechanism, noise_multiplier=sigma), *arguments)

    with mock.patch.object(tanager.GaussianNoise, "__init__", wrong):
        yield


with noise_times(0.5):
    wrong = audit()
print(f"at least ε = {wrong.epsilon_lower_bound:.2f}, with confidence 95 %")
print(f"claimed  ε = {wrong.claimed_epsilon:.2f}; violated: {wrong.violated}")
print(f"noise multiplier {claimed.noise_multiplier} is claimed,", end=" ")
print(f"it is at most {wrong.noise_multiplier:.2f}")

# %% [markdown]
# The attacker has a score for each canary, which says how likely it was in the data.
# With half the noise, the two groups separate.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
for axis, found, title in (
    (axes[0], right, "noise as claimed"),
    (axes[1], wrong, "half of the noise"),
):
    scores = np.concatenate([found.inside, found.outside])
    low, high = np.quantile(scores, (0.005, 0.995))
    bins = np.linspace(low, high, 40)
    for group, label, colour in (
        (found.outside, "not in the data", "#767676"),
        (found.inside, "in the data", "#d55e00"),
    ):
        axis.hist(group, bins, alpha=0.6, color=colour, label=label)
    axis.set_title(title)
    axis.set_xlabel("log likelihood ratio, by the claimed noise")
axes[0].set_ylabel("canaries")
axes[0].legend()
figure.savefig(OUT / "scores.png", dpi=150)

# %% [markdown]
# ## How small a bug can be seen
#
# The same audit with other factors. The bound follows the ε that is really spent,
# from a little below. A bug shows when the bound exceeds the claim. To find a few per
# cent of missing noise, the audit would need more canaries.

# %%
FACTORS = (2.0, 1.0, 0.75, 0.5)
bounds = {1.0: right, 0.5: wrong}
for factor in (2.0, 0.75):
    with noise_times(factor):
        bounds[factor] = audit()

figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
for place, factor in enumerate(FACTORS):
    noise = factor * claimed.noise_multiplier
    real = tanager.epsilon(dataclasses.replace(claimed, noise_multiplier=noise), DELTA)
    found = bounds[factor]
    colour = "#d55e00" if found.violated else "#0072b2"
    axis.bar(place, found.epsilon_lower_bound, 0.5, color=colour)
    axis.hlines(real, place - 0.35, place + 0.35, color="black", linewidth=2)
    print(f"noise × {factor:<5g} really spent {real:6.2f},", end=" ")
    print(f"at least {found.epsilon_lower_bound:6.2f}; violated: {found.violated}")
axis.axhline(right.claimed_epsilon, color="black", linestyle="--", linewidth=1)
axis.annotate(
    "claimed", (-0.45, right.claimed_epsilon), (0, 4), textcoords="offset points"
)
axis.set_xticks(range(len(FACTORS)), [f"× {factor:g}" for factor in FACTORS])
axis.set_xlabel("noise that is added, as a factor of the noise that is claimed")
axis.set_ylabel(f"ε at δ = {DELTA:g}")
figure.savefig(OUT / "bounds.png", dpi=150)

# %% [markdown]
# Bars are what the attack proves, and short black lines are what is really spent.
#
# ## Where the bug is
#
# The audit says that something is wrong, but not what. A replay trains a few steps
# again and again with known secrets, and compares what it sees with the definition of
# DP-SGD.

# %%
with noise_times(0.5):
    findings = replay(problem, algorithm)
for finding in findings:
    print(f"{'ok    ' if finding.passed else 'FAILED'} {finding.check}")
