"""CIFAR-10 from random initialisation, as published.

Sources: the Unlocking paper (De et al. 2022, arXiv:2204.13650), Tables 3 and 13 or 14;
the TAN paper (Sander et al. 2023, arXiv:2210.03403), section 4.4 and Table 5.

Shared by the Unlocking paper's runs: group norm of 16 groups, weight standardisation,
plain SGD at a constant learning rate, C = 1, average of parameters at 0.9999 (section
3.1 and appendix C.3); random crops of 4 mirrored pixels and flips (appendix C.2); the
50 000 training images and the official test set (section 3.2). The order ReLU, norm,
convolution is that of the paper's released code (jax_privacy), and the TAN paper's
"post-activation". The TAN paper's run has no weight standardisation: neither its text
nor its code (facebookresearch/tan, src/models/wideresnet.py) knows of any.

The accuracies are medians of 5 runs. The published ε are by RDP; the accountant of a
run here is PLD, so at the same σ and T it reports 7 to 9 % less.
"""

import dataclasses
from typing import Any

from tanager.recipes import published
from tanager.recipes.published import PublishedRun
from tanager.recipes.recipe import Recipe, RecipeEntry, published_fields


def _repeat(row: PublishedRun, **fields: Any) -> Recipe:
    return Recipe(
        dataset="cifar10",
        model=row.model,
        epsilon=row.epsilon,
        noise_multiplier=row.noise_multiplier,
        steps=row.steps,
        crop_padding=4,
        flip=True,
        **published_fields(row),
        **fields,
    )


WRN_16_4 = RecipeEntry(
    name="cifar10-wrn-16-4",
    summary="CIFAR-10 without extra data, wide residual network 16-4.",
    source="Unlocking, Table 13",
    recipe=_repeat(published.CIFAR10_WRN_16_4[-1], physical_batch_size=64),
    published=published.CIFAR10_WRN_16_4,
)

WRN_40_4 = RecipeEntry(
    name="cifar10-wrn-40-4",
    summary="CIFAR-10 without extra data, wide residual network 40-4: the best.",
    source="Unlocking, Table 14",
    recipe=_repeat(published.CIFAR10_WRN_40_4[-1], physical_batch_size=32),
    published=published.CIFAR10_WRN_40_4,
)

_TAN_SOURCE = "TAN, section 4.4"

WRN_16_4_TAN = RecipeEntry(
    name="cifar10-wrn-16-4-tan",
    summary="The TAN paper's reference on CIFAR-10, without augmentation.",
    source="TAN, Table 5",
    recipe=_repeat(
        published.TAN_REFERENCE[0], implementation="tan", weight_standardisation=False
    ),
    published=published.TAN_REFERENCE,
)

WRN_16_4_TAN_PRE_ACTIVATION = RecipeEntry(
    name="cifar10-wrn-16-4-tan-pre-activation",
    summary="The same with group norm before the ReLU, for TAN's Figure 5.",
    source=f"{_TAN_SOURCE}, Figure 5 (plotted only)",
    recipe=dataclasses.replace(
        WRN_16_4_TAN.recipe, normalisation_order="pre-activation", epsilon=None
    ),
)

WRN_16_4_TAN_VIEWS = RecipeEntry(
    name="cifar10-wrn-16-4-tan-16-views",
    summary="The same with 16 augmented views of each image, for TAN's Figure 5.",
    source=f"{_TAN_SOURCE}, Figure 5 (plotted only)",
    recipe=dataclasses.replace(
        WRN_16_4_TAN.recipe, augmentation_multiplicity=16, epsilon=None
    ),
)


def _tan_fraction(examples: int, accuracy: str) -> RecipeEntry:
    recipe = dataclasses.replace(
        WRN_16_4_TAN.recipe,
        epsilon=None,
        train_examples=examples,
        delta=1e-5 * published.CIFAR_EXAMPLES / examples,
    )
    return RecipeEntry(
        name=f"cifar10-wrn-16-4-tan-{examples // 1000}k",
        summary=f"The same on {examples:,} of the training images, for TAN's Table 5.",
        source="TAN, Table 5",
        recipe=recipe,
        expected=f"{accuracy} %, published",
    )


TAN_FRACTIONS = (
    _tan_fraction(5_000, "59.9 ± 1"),
    _tan_fraction(25_000, "71.1 ± 0.4"),
    _tan_fraction(40_000, "72.9 ± 0.1"),
)
"""Their ε as published come out at no plausible δ, so they have no published row."""
