"""MNIST with a small convolutional network."""

from tanager.recipes.recipe import Recipe, RecipeEntry


MNIST_SMALL_CNN = RecipeEntry(
    name="mnist-small-cnn",
    summary="MNIST with a small convolutional network; not tuned.",
    source="tanager",
    recipe=Recipe(
        dataset="mnist",
        model="small-cnn",
        epsilon=3.0,
        delta=1e-5,
        batch_size=2048,
        steps=600,
        learning_rate=2.0,
        ema_decay=0.99,
        evaluate_every=50,
    ),
)
