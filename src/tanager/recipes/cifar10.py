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

from tanager.recipes.recipe import RecipeEntry, from_papers


CROPS = {"crop_padding": 4, "flip": True}

WRN_16_4 = from_papers(
    "cifar10-wrn-16-4",
    "CIFAR-10 without extra data, wide residual network 16-4.",
    dataset="cifar10",
    physical_batch_size=64,
    **CROPS,
)

WRN_40_4 = from_papers(
    "cifar10-wrn-40-4",
    "CIFAR-10 without extra data, wide residual network 40-4: the best.",
    dataset="cifar10",
    physical_batch_size=32,
    **CROPS,
)

WRN_16_4_TAN = from_papers(
    "cifar10-wrn-16-4-tan",
    "The TAN paper's reference on CIFAR-10, without augmentation.",
    dataset="cifar10",
    implementation="tan",
    weight_standardisation=False,
    **CROPS,
)


def _like_tan(name: str, summary: str, source: str, **fields: Any) -> RecipeEntry:
    expected = fields.pop("expected", "")
    recipe = dataclasses.replace(WRN_16_4_TAN.recipe, epsilon=None, **fields)
    return RecipeEntry(
        name=f"{WRN_16_4_TAN.name}-{name}",
        summary=f"The same {summary}.",
        source=source,
        recipe=recipe,
        expected=expected,
    )


_PLOTTED = "TAN, section 4.4, Figure 5 (plotted only)"

WRN_16_4_TAN_PRE_ACTIVATION = _like_tan(
    "pre-activation",
    "with group norm before the ReLU, for TAN's Figure 5",
    _PLOTTED,
    normalisation_order="pre-activation",
)

WRN_16_4_TAN_VIEWS = _like_tan(
    "16-views",
    "with 16 augmented views of each image, for TAN's Figure 5",
    _PLOTTED,
    augmentation_multiplicity=16,
)

TAN_FRACTIONS = tuple(
    _like_tan(
        f"{examples // 1000}k",
        f"on {examples:,} of the training images, for TAN's Table 5",
        "TAN, Table 5",
        train_examples=examples,
        delta=1e-5 * 50_000 / examples,
        expected=f"{accuracy} %, published",
    )
    for examples, accuracy in (
        (5_000, "59.9 ± 1"),
        (25_000, "71.1 ± 0.4"),
        (40_000, "72.9 ± 0.1"),
    )
)
"""No plausible δ gives their published ε, so they have no published row."""
