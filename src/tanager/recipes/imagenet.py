"""ImageNet: from random initialisation, and the last layer of pretrained models.

Sources: the Unlocking paper (De et al. 2022, arXiv:2204.13650), Tables 15, 21, 22, and
23 for Places-365; the TAN paper (Sander et al. 2023, arXiv:2210.03403), Tables 2 and 4.

The images are read as they are needed (`tanager.data.load`), resized to
1.2 times what the model sees where crops are taken (appendix C.2), TAN's to 256 pixels.
Average of parameters at 0.99999 (appendix C.3), TAN's at 0.999. The models of Tables 21
to 23 were pretrained on JFT, which is not public: bring weights of your own.
"""

import dataclasses
from typing import Any

from tanager.recipes.papers import rows_of
from tanager.recipes.recipe import RecipeEntry, from_papers


_SIDE, _PLACES_SIDE = 224, 256


def _entry(
    name: str, summary: str, pretrained_on: str = "", **fields: Any
) -> RecipeEntry:
    shared = {"dataset": "imagenet", "ema_decay": 0.99999, "physical_batch_size": 64}
    steps = rows_of(name)[-1].steps
    return from_papers(
        name,
        summary,
        pretrained_on=pretrained_on,
        **shared | {"evaluate_every": max(1, steps // 20)} | fields,
    )


NF_RESNET_50 = _entry(
    "imagenet-nf-resnet-50",
    "ImageNet without extra data, NF-ResNet-50 with four views of each image.",
    image_size=int(1.2 * _SIDE),
    crop_size=_SIDE,
    flip=True,
)

_AS_TAN = {
    "image_size": 256,
    "crop_size": _SIDE,
    "implementation": "tan",
    "augmentation": "tan",
    "crop_padding": 20,
    "flip": True,
    "ema_decay": 0.999,
}
NF_RESNET_50_TAN = _entry(
    "imagenet-nf-resnet-50-tan",
    "ImageNet without extra data, as found by TAN: the best from scratch.",
    **_AS_TAN,
)
NF_RESNET_50_TAN_LONGER = _entry(
    "imagenet-nf-resnet-50-tan-72k",
    "The same in 72,000 updates of half the batch, before TAN's search of both.",
    **_AS_TAN,
)


def _last_layer(model: str, pretrained_on: str) -> RecipeEntry:
    return _entry(
        f"imagenet-{model}-last-layer",
        f"ImageNet on the features of a pretrained {model}: the last layer.",
        pretrained_on,
        image_size=320,
        fine_tune="last-layer",
        physical_batch_size=8192,
    )


NF_RESNET_200_LAST_LAYER = _last_layer(
    "nf-resnet-200", "JFT-300M or JFT-4B (not public)"
)
NFNET_F3_LAST_LAYER = _last_layer("nfnet-f3", "JFT-4B (not public)")

PLACES_ALL = _entry(
    "places365-nf-resnet-50",
    "Places-365 from a pretrained NF-ResNet-50, all layers.",
    "JFT-300M (not public)",
    dataset="places365",
    image_size=_PLACES_SIDE,
)
PLACES_LAST_LAYER = _entry(
    "places365-nf-resnet-50-last-layer",
    "Places-365 from a pretrained NF-ResNet-50, the last layer.",
    "JFT-300M (not public)",
    dataset="places365",
    image_size=_PLACES_SIDE,
    fine_tune="last-layer",
)


def _without_privacy(
    private: RecipeEntry, steps: int, learning_rate: float, accuracy: str
) -> RecipeEntry:
    """Return the column with ε = ∞ of Table 23 beside a private one."""
    recipe = dataclasses.replace(
        private.recipe,
        non_private=True,
        epsilon=None,
        delta=None,
        noise_multiplier=None,
        clip_norm=1.0,
        batch_size=1024,
        steps=steps,
        learning_rate=learning_rate,
        evaluate_every=steps // 20,
    )
    return RecipeEntry(
        name=f"{private.name}-non-private",
        summary=f"NOT PRIVATE: {private.summary}",
        source="Unlocking, Table 23",
        recipe=recipe,
        pretrained_on=private.pretrained_on,
        expected=f"{accuracy} (Table 7, with JFT-300M)",
    )


PLACES_WITHOUT_PRIVACY = (
    _without_privacy(PLACES_ALL, 8250, 0.3, "57.0 %"),
    _without_privacy(PLACES_LAST_LAYER, 46_500, 0.1, "54.5 %"),
)
