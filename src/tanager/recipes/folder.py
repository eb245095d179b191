"""Your own images: one folder for each class."""

from tanager.recipes.recipe import Recipe, RecipeEntry


FOLDER = RecipeEntry(
    name="folder",
    summary="Your own images, one folder for each class (--data); a start, not tuned.",
    source="tanager",
    recipe=Recipe(
        dataset="folder",
        model="wrn-16-4",
        epsilon=8.0,
        batch_size=256,
        steps=1000,
        learning_rate=2.0,
        ema_decay=0.999,
        physical_batch_size=64,
    ),
)
