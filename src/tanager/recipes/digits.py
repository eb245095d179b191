"""Scikit-learn's handwritten digits: the demonstration that needs no download."""

from tanager.recipes.recipe import Recipe, RecipeEntry


DIGITS = RecipeEntry(
    name="digits",
    summary="8×8 handwritten digits, built in: a private model in about a minute.",
    source="tanager",
    recipe=Recipe(
        dataset="digits",
        model="small-cnn",
        epsilon=3.0,
        delta=1e-4,
        batch_size=256,
        steps=200,
        learning_rate=2.0,
        ema_decay=0.99,
        augmentation_multiplicity=4,
        crop_padding=1,
        physical_batch_size=128,
        evaluate_every=20,
    ),
)
