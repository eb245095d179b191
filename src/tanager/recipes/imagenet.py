"""ImageNet: from random initialisation, and the last layer of pretrained models.

Sources: the Unlocking paper (De et al. 2022, arXiv:2204.13650), Tables 15, 21, 22, and
23 for Places-365; the TAN paper (Sander et al. 2023, arXiv:2210.03403), Tables 2 and 4.

The images are read as they are needed (`tanager.data.load`), resized to
1.2 times what the model sees where crops are taken (appendix C.2), TAN's to 256 pixels.
Average of parameters at 0.99999 (appendix C.3), TAN's at 0.999. The models of Tables 21
to 23 were pretrained on JFT, which is not public: bring weights of your own.
"""

from typing import Any

from tanager.recipes import published
from tanager.recipes.published import PublishedRun
from tanager.recipes.recipe import Recipe, RecipeEntry, published_fields


_SIDE = 224
_FINE_TUNED_SIDE = 320
_ENLARGED = int(1.2 * _SIDE)
_TAN_STORED = 256


def _repeat(row: PublishedRun, **fields: Any) -> Recipe:
    return Recipe(
        **{
            "dataset": "imagenet",
            "model": row.model,
            "epsilon": row.epsilon,
            "noise_multiplier": row.noise_multiplier,
            "steps": row.steps,
            "ema_decay": 0.99999,
            "physical_batch_size": 64,
            "evaluate_every": max(1, row.steps // 20),
            **published_fields(row),
            **fields,
        }
    )


NF_RESNET_50 = RecipeEntry(
    name="imagenet-nf-resnet-50",
    summary="ImageNet without extra data, NF-ResNet-50 with four views of each image.",
    source="Unlocking, Table 15",
    recipe=_repeat(
        published.IMAGENET_NF_RESNET_50[0],
        image_size=_ENLARGED,
        crop_size=_SIDE,
        flip=True,
    ),
    published=published.IMAGENET_NF_RESNET_50,
)

NF_RESNET_50_TAN = RecipeEntry(
    name="imagenet-nf-resnet-50-tan",
    summary="ImageNet without extra data, as found by TAN: the best from scratch.",
    source="TAN, Table 4",
    recipe=_repeat(
        published.TAN_IMAGENET[0],
        image_size=_TAN_STORED,
        crop_size=_SIDE,
        implementation="tan",
        augmentation="tan",
        crop_padding=20,
        flip=True,
        ema_decay=0.999,
    ),
    published=published.TAN_IMAGENET,
)


def _last_layer(
    name: str, table: int, rows: tuple[PublishedRun, ...], pretrained_on: str
) -> RecipeEntry:
    model = rows[-1].model
    return RecipeEntry(
        name=name,
        summary=f"ImageNet on the features of a pretrained {model}: the last layer.",
        source=f"Unlocking, Table {table}",
        recipe=_repeat(
            rows[-1],
            image_size=_FINE_TUNED_SIDE,
            fine_tune="last-layer",
            physical_batch_size=8192,
        ),
        published=rows,
        pretrained_on=pretrained_on,
    )


NF_RESNET_200_LAST_LAYER = _last_layer(
    "imagenet-nf-resnet-200-last-layer",
    21,
    published.JFT_TO_IMAGENET_NF_RESNET_200,
    "JFT-300M or JFT-4B (not public)",
)

NFNET_F3_LAST_LAYER = _last_layer(
    "imagenet-nfnet-f3-last-layer",
    22,
    published.JFT_TO_IMAGENET_NFNET_F3,
    "JFT-4B (not public)",
)

PLACES_ALL = RecipeEntry(
    name="places365-nf-resnet-50",
    summary="Places-365 from a pretrained NF-ResNet-50, all layers.",
    source="Unlocking, Table 23",
    recipe=_repeat(
        published.JFT_TO_PLACES_ALL[0], dataset="places365", image_size=_SIDE
    ),
    published=published.JFT_TO_PLACES_ALL,
    pretrained_on="JFT-300M (not public)",
)

PLACES_LAST_LAYER = RecipeEntry(
    name="places365-nf-resnet-50-last-layer",
    summary="Places-365 from a pretrained NF-ResNet-50, the last layer.",
    source="Unlocking, Table 23",
    recipe=_repeat(
        published.JFT_TO_PLACES_LAST[0],
        dataset="places365",
        image_size=_SIDE,
        fine_tune="last-layer",
    ),
    published=published.JFT_TO_PLACES_LAST,
    pretrained_on="JFT-300M (not public)",
)
