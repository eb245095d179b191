"""The public data sets: what their files hold, and constants that were published."""

from tanager.data.find import Wanted
from tanager.data.folder import TESTS


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

_HALF = (0.5,) * 3
_HELD_OUT = ("val", "validation", "test")  # What is named test often has no labels.
_IMAGENET = (Wanted(_HELD_OUT), IMAGENET_MEAN, IMAGENET_STD)
FILES = {
    "cifar10": (
        Wanted(("test",), (32, 32, 3), tuple(_CIFAR10.split())),
        _CIFAR_MEAN,
        _CIFAR_STD,
    ),
    "cifar100": (
        Wanted(
            ("test",), (32, 32, 3), tuple(_CIFAR100.split()), ("fine_label", "label")
        ),
        _CIFAR_MEAN,
        _CIFAR_STD,
    ),
    "mnist": (Wanted(("test",), (28, 28, 1), DIGITS), (0.1307,), (0.3081,)),
    "folder": (Wanted(TESTS, own=True), _HALF, _HALF),
    "imagenet": _IMAGENET,
    "imagenet-32": (Wanted(_HELD_OUT), _HALF, _HALF),  # Unlocking, appendix C.2
    "places365": _IMAGENET,
}
"""What the files of a data set must hold, and its mean and deviation."""
DATASETS = ("digits", *FILES, "features")
"""The names that `load` takes."""
RESIZED = tuple(name for name, (wanted, *_) in FILES.items() if not wanted.classes)
"""Data sets whose images are resized as they are read."""
