"""A last layer on features of dead leaves: no public image, no pretrained weights.

Tang et al. 2023 (arXiv:2306.06076) learn priors from images of random processes on
accelerators. Here such images give the filters and the whitening of one convolution.
Settings were chosen on 5,000 training images that the others did not hold.
"""

from tanager.recipes.recipe import Recipe, RecipeEntry


CIFAR10 = RecipeEntry(
    name="cifar10-dead-leaves",
    summary="CIFAR-10 without public images: a last layer on patches of dead leaves.",
    source="tanager; features like Coates, Lee and Ng 2011",
    expected="73.1 % at ε = 3, three runs here",
    recipe=Recipe(
        dataset="cifar10",
        model="dead-leaves-linear",
        head="zero",
        fine_tune="last-layer",
        head_input="norm",
        mirror=True,
        solver="auto",
        epsilon=3.0,
        delta=1e-5,
        batch_size=0,
        learning_rate=0.0,
        clip_norm=0.0,
        optimizer_options={"momentum": 0.9},
        ema_decay=0.9,
        evaluate_every=20,
    ),
)
