"""CIFAR-10 and CIFAR-100 from pretrained models, and that pretraining.

Sources: the Unlocking paper (De et al. 2022, arXiv:2204.13650), Tables 16 to 20, with
the pretraining of its appendix C.3; the efficiency paper (Rodriguez Beltran et al.
2024, arXiv:2406.17298), appendix A.3, Table A2.

Shared by the Unlocking paper's: C = 1, constant learning rate, average of parameters at
0.9999, random crops of 4 mirrored pixels and flips.
"""

from typing import Any

from tanager.recipes.cifar10 import CROPS
from tanager.recipes.recipe import Recipe, RecipeEntry, from_papers


def _fine_tuned(
    name: str, summary: str, pretraining: str, **fields: Any
) -> RecipeEntry:
    return from_papers(
        name,
        f"{summary} of a pretrained {fields.pop('model')}.",
        pretrained_on=pretraining,
        physical_batch_size=32,
        **CROPS,
        **fields,
    )


FROM_IMAGENET32 = tuple(
    _fine_tuned(
        f"{dataset}-wrn-28-10-{layers}",
        f"ImageNet-32 → {title}, {layers.replace('-', ' ')}",
        "ImageNet at 32×32: recipe imagenet32-wrn-28-10-pretraining",
        model="wrn-28-10",
        dataset=dataset,
        fine_tune="last-layer" if layers == "last-layer" else "all",
    )
    for dataset, title in (("cifar10", "CIFAR-10"), ("cifar100", "CIFAR-100"))
    for layers in ("all-layers", "last-layer")
)

FROM_CIFAR100 = _fine_tuned(
    "cifar10-wrn-40-4-from-cifar100",
    "CIFAR-100 → CIFAR-10, all layers",
    "CIFAR-100: recipe cifar100-wrn-40-4-pretraining",
    model="wrn-40-4",
    dataset="cifar10",
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
        **CROPS,
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
        **CROPS,
    ),
)


def _efficiency(
    model: str, weights: str, learning_rate: float, clip_norm: float
) -> RecipeEntry:
    return RecipeEntry(
        name=f"cifar100-{model}",
        summary=f"CIFAR-100 at 224 pixels, all layers of {model}: four large steps.",
        source="Efficiency, Table A2",
        recipe=Recipe(
            dataset="cifar100",
            image_size=224,
            model=model,
            weights=f"hf:timm/{weights}",
            head="zero",
            epsilon=8.0,
            delta=2.04e-5,
            batch_size=25_000,
            steps=4,
            clip_norm=clip_norm,
            optimizer="adam",
            learning_rate=learning_rate,
            ema_decay=0.0,
            evaluate_every=1,
        ),
        pretrained_on="ImageNet-21k",
    )


EFFICIENCY = (
    _efficiency(
        "vit-base-16", "vit_base_patch16_224.augreg2_in21k_ft_in1k", 3e-4, 4.63
    ),
    _efficiency("bit-50x1", "resnetv2_50x1_bit.goog_in21k", 9.8e-4, 6.53),
)
"""The optimizer is not named by the paper; Adam is that of Tobaben et al. 2023, whose
hyper-parameters these are. Its accuracies after four steps are not of interest."""
