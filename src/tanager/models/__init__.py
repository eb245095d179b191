"""Models for ONE image `[H, W, C]`, as Equinox modules; batching is `vmap`."""

from tanager.models.bit import BiT as BiT
from tanager.models.counts import count_flops as count_flops
from tanager.models.counts import count_parameters as count_parameters
from tanager.models.layers import Conv as Conv
from tanager.models.layers import GroupNorm as GroupNorm
from tanager.models.layers import Linear as Linear
from tanager.models.layers import StandardisedConv as StandardisedConv
from tanager.models.layers import standardise as standardise
from tanager.models.lenet import LeNet as LeNet
from tanager.models.resnet import ResNet as ResNet
from tanager.models.small_cnn import SmallCNN as SmallCNN
from tanager.models.wide_resnet import WideResNet as WideResNet
from tanager.models.zoo import ENTRIES as ENTRIES
from tanager.models.zoo import MODELS as MODELS
from tanager.models.zoo import ModelEntry as ModelEntry
from tanager.models.zoo import create as create
from tanager.models.zoo import find as find
