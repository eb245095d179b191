"""CIFAR-10 and CIFAR-100 from pretrained models, and that pretraining.

Sources: the Unlocking paper (De et al. 2022, arXiv:2204.13650), Tables 16 to 20, with
the pretraining of its appendix C.3; the efficiency paper (Rodriguez Beltran et al.
2024, arXiv:2406.17298), appendix A.3, Table A2.

Shared by the Unlocking paper's: C = 1, constant learning rate, average of parameters at
0.9999, random crops of 4 mirrored pixels and flips.
"""

from typing import Any

from tanager.recipes import published
from tanager.recipes.published import PublishedRun
from tanager.recipes.recipe import Recipe, RecipeEntry, published_fields


_CIFAR_CROPS = {"crop_padding": 4, "flip": True}


def _from(
    name: str,
    dataset: str,
    table: int,
    rows: tuple[PublishedRun, ...],
    pretrained_on: str,
    **fields: Any,
) -> RecipeEntry:
    row = rows[-1]
    recipe = Recipe(
        dataset=dataset,
        model=row.model,
        epsilon=row.epsilon,
        noise_multiplier=row.noise_multiplier,
        steps=row.steps,
        physical_batch_size=32,
        **_CIFAR_CROPS,
        **published_fields(row),
        **fields,
    )
    return RecipeEntry(
        name=name,
        summary=f"{row.task} of a pretrained {row.model}.",
        source=f"Unlocking, Table {table}",
        recipe=recipe,
        published=rows,
        pretrained_on=pretrained_on,
    )


_IMAGENET32 = "ImageNet at 32×32: recipe imagenet32-wrn-28-10-pretraining"

FROM_IMAGENET32 = (
    _from(
        "cifar10-wrn-28-10-all-layers",
        "cifar10",
        16,
        published.IMAGENET32_TO_CIFAR10_ALL,
        _IMAGENET32,
    ),
    _from(
        "cifar10-wrn-28-10-last-layer",
        "cifar10",
        17,
        published.IMAGENET32_TO_CIFAR10_LAST,
        _IMAGENET32,
        fine_tune="last-layer",
    ),
    _from(
        "cifar100-wrn-28-10-all-layers",
        "cifar100",
        18,
        published.IMAGENET32_TO_CIFAR100_ALL,
        _IMAGENET32,
    ),
    _from(
        "cifar100-wrn-28-10-last-layer",
        "cifar100",
        19,
        published.IMAGENET32_TO_CIFAR100_LAST,
        _IMAGENET32,
        fine_tune="last-layer",
    ),
)

FROM_CIFAR100 = _from(
    "cifar10-wrn-40-4-from-cifar100",
    "cifar10",
    20,
    published.CIFAR100_TO_CIFAR10,
    "CIFAR-100: recipe cifar100-wrn-40-4-pretraining",
)

IMAGENET32_PRETRAINING = RecipeEntry(
    name="imagenet32-wrn-28-10-pretraining",
    summary="NOT PRIVATE: ImageNet at 32×32, to fine-tune from.",
    source="Unlocking, appendix C.3",
    recipe=Recipe(
        dataset="imagenet-32",
        image_size=32,
        model="wrn-28-10",
        non_private=True,
        batch_size=1024,
        steps=240_000,
        learning_rate=0.3,
        optimizer_options={"momentum": 0.9},
        weight_decay=5e-5,
        augmentation_multiplicity=1,
        evaluate_every=5000,
        **_CIFAR_CROPS,
    ),
)

CIFAR100_PRETRAINING = RecipeEntry(
    name="cifar100-wrn-40-4-pretraining",
    summary="NOT PRIVATE: CIFAR-100, to fine-tune from.",
    source="Unlocking, appendix C.3",
    recipe=Recipe(
        dataset="cifar100",
        model="wrn-40-4",
        non_private=True,
        batch_size=128,
        steps=100_000,
        learning_rate=0.1,
        learning_rate_schedule="step",
        optimizer_options={"momentum": 0.9},
        weight_decay=5e-4,
        augmentation_multiplicity=1,
        evaluate_every=5000,
        **_CIFAR_CROPS,
    ),
)


def _efficiency(
    name: str, model: str, weights: str, rate: float, norm: float
) -> RecipeEntry:
    return RecipeEntry(
        name=name,
        summary=f"CIFAR-100 at 224 pixels, all layers of {model}: four large steps.",
        source="Efficiency, Table A2",
        recipe=Recipe(
            dataset="cifar100",
            image_size=224,
            model=model,
            weights=weights,
            head="zero",
            epsilon=8.0,
            delta=2.04e-5,
            batch_size=25_000,
            steps=4,
            clip_norm=norm,
            optimizer="adam",
            learning_rate=rate,
            ema_decay=0.0,
            evaluate_every=1,
        ),
        pretrained_on="ImageNet-21k",
    )


EFFICIENCY = (
    _efficiency(
        "cifar100-vit-base-16",
        "vit-base-16",
        "hf:timm/vit_base_patch16_224.augreg2_in21k_ft_in1k",
        0.0003,
        4.63,
    ),
    _efficiency(
        "cifar100-bit-50x1",
        "bit-50x1",
        "hf:timm/resnetv2_50x1_bit.goog_in21k",
        0.00098,
        6.53,
    ),
)
"""The optimizer is not named by the paper; Adam is that of Tobaben et al. 2023, whose
hyper-parameters these are. Its accuracies after four steps are not of interest."""
