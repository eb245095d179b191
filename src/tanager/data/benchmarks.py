"""The public benchmarks: their classes and constants."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What the files of a public data set must hold.

    Attributes:
        classes: the class names, in the order of the labels.
        image_shape: (H, W, C).
        mean: per channel on the 0..1 scale, of the public training images.
        std: likewise.
        label_columns: names that the label column of a table may have.
    """

    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    label_columns: tuple[str, ...] = ("label",)


_CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
_CIFAR_STD = (0.2470, 0.2435, 0.2616)
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy
bridge bus butterfly camel can castle caterpillar cattle chair chimpanzee clock
cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion
lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange
orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
snail snake spider squirrel streetcar sunflower sweet_pepper table tank
telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
DIGITS = tuple("0123456789")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of ImageNet's training images, per channel on the 0..1 scale: public constants.

As commonly published, first with the models of torchvision:
https://docs.pytorch.org/vision/stable/models.html
"""
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Standard deviation, as `IMAGENET_MEAN`."""

BENCHMARKS = {
    "cifar10": Benchmark(tuple(_CIFAR10.split()), (32, 32, 3), _CIFAR_MEAN, _CIFAR_STD),
    "cifar100": Benchmark(
        tuple(_CIFAR100.split()),
        (32, 32, 3),
        _CIFAR_MEAN,
        _CIFAR_STD,
        ("fine_label", "label"),
    ),
    "mnist": Benchmark(DIGITS, (28, 28, 1), (0.1307,), (0.3081,)),
}
