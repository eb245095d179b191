"""A last layer on features that are fixed: no public image, no pretrained weights.

Wavelet scattering: Tramèr and Boneh 2021 (arXiv:2011.11660), table 1. At ε = 3 and
δ = 1e-5, a linear layer reaches 67.0 % on CIFAR-10 and 98.7 % on MNIST. Two
convolutions (`scattering-cnn` here) reach 69.3 % on CIFAR-10. They normalise by private
means and variances, which cost budget; here, those of random images are used.

Dead leaves: Tang et al. 2023 (arXiv:2306.06076) learn priors from images of random
processes on accelerators. Here such images give the filters and the whitening of one
convolution.

Settings were chosen on 5,000 training images that the others did not hold.
"""

from typing import Any

from tanager.recipes.public_features import LAST_LAYER
from tanager.recipes.recipe import Recipe, RecipeEntry


_SCATTERING: dict[str, Any] = {
    "model": "scattering-linear",
    "epsilon": 3.0,
    "delta": 1e-5,
    "optimizer_options": {"momentum": 0.9},
    "ema_decay": 0.97,
    "physical_batch_size": 512,
}
_SOURCE = "tanager; like Tramèr and Boneh 2021 ({} at ε = 3)"

CIFAR10_SCATTERING = RecipeEntry(
    name="cifar10-scattering",
    summary="CIFAR-10 without public images: a linear layer on wavelet scattering.",
    source=_SOURCE.format("67.0 %"),
    expected="67.7 % at ε = 3, three runs here",
    recipe=Recipe(
        dataset="cifar10",
        mirror=True,
        batch_size=8192,
        steps=240,
        clip_norm=5.0,
        learning_rate=0.4,
        evaluate_every=60,
        **_SCATTERING,
    ),
)

MNIST_SCATTERING = RecipeEntry(
    name="mnist-scattering",
    summary="MNIST without public images: a linear layer on wavelet scattering.",
    source=_SOURCE.format("98.7 %"),
    expected="98.7 % at ε = 3, three runs here",
    recipe=Recipe(
        dataset="mnist",
        batch_size=4096,
        steps=600,
        clip_norm=0.1,
        learning_rate=0.6,
        evaluate_every=100,
        **_SCATTERING,
    ),
)

CIFAR10_DEAD_LEAVES = RecipeEntry(
    name="cifar10-dead-leaves",
    summary="CIFAR-10 without public images: a last layer on patches of dead leaves.",
    source="tanager; features like Coates, Lee and Ng 2011",
    expected="73.1 % at ε = 3, three runs here",
    recipe=Recipe(
        dataset="cifar10",
        model="dead-leaves-linear",
        head_input="norm",
        mirror=True,
        epsilon=3.0,
        delta=1e-5,
        clip_norm=0.0,
        ema_decay=0.9,
        evaluate_every=20,
        **LAST_LAYER,
    ),
)
