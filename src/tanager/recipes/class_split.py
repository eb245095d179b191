"""Half of CIFAR-10's classes in the open, the other half in private.

What pretraining is worth where no other data are at hand: a small network learns the
first five classes without privacy and is fine-tuned privately on the other five, which
it has never seen. Accuracies measured here are in docs/results.md.
"""

from tanager.recipes.recipe import Recipe, RecipeEntry


PUBLIC = ("airplane", "automobile", "bird", "cat", "deer")
PRIVATE = ("dog", "frog", "horse", "ship", "truck")

_MODEL = "wrn-10-1"
_SIDE = 16

PRETRAINING = RecipeEntry(
    name="cifar10-first-five-pretraining",
    summary="NOT PRIVATE: five classes of CIFAR-10, to fine-tune from.",
    source="tanager",
    expected="80.2 %, one run here",
    recipe=Recipe(
        dataset="cifar10",
        classes=PUBLIC,
        image_size=_SIDE,
        model=_MODEL,
        non_private=True,
        batch_size=128,
        steps=2000,
        learning_rate=0.1,
        learning_rate_schedule="cosine",
        warmup_steps=100,
        optimizer_options={"momentum": 0.9},
        weight_decay=5e-4,
        ema_decay=0.99,
        augmentation_multiplicity=1,
        crop_padding=4,
        flip=True,
        physical_batch_size=32,
        evaluate_every=250,
    ),
)

OTHER_FIVE = RecipeEntry(
    name="cifar10-other-five",
    summary="Five classes of CIFAR-10, from --weights of the other five, or scratch.",
    source="tanager",
    expected="76.6 % from the other five, 61.9 % from scratch, one run each here",
    recipe=Recipe(
        dataset="cifar10",
        classes=PRIVATE,
        image_size=_SIDE,
        model=_MODEL,
        head="zero",
        epsilon=4.0,
        delta=1e-5,
        batch_size=1024,
        steps=50,
        learning_rate=4.0,
        ema_decay=0.95,
        physical_batch_size=32,
        evaluate_every=25,
    ),
)
