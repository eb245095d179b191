"""Data: sources of examples, data sets by name, augmentation.

`augment` is a module of its own, `tanager.data.augment`, loaded on first use.
"""

import importlib
from typing import Any

from tanager.data.datasets import Dataset as Dataset
from tanager.data.datasets import image_shape as image_shape
from tanager.data.datasets import load as load
from tanager.data.features import FeatureFile as FeatureFile
from tanager.data.features import read_features as read_features
from tanager.data.features import write_features as write_features
from tanager.data.known import DATASETS as DATASETS
from tanager.data.known import IMAGENET_MEAN as IMAGENET_MEAN
from tanager.data.known import IMAGENET_STD as IMAGENET_STD
from tanager.data.known import RESIZED as RESIZED
from tanager.data.layout import Layout as Layout
from tanager.data.source import ArraySource as ArraySource
from tanager.data.source import Source as Source
from tanager.data.source import StreamedSource as StreamedSource
from tanager.data.source import UnreadableExample as UnreadableExample
from tanager.data.source import as_source as as_source
from tanager.data.source import gather as gather
from tanager.data.source import subset as subset


def __getattr__(name: str) -> Any:
    if name == "augment":
        return importlib.import_module("tanager.data.augment")
    raise AttributeError(f"module 'tanager.data' has no attribute {name!r}")
