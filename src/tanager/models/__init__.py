"""Models for ONE image `[H, W, C]`, as Equinox modules; batching is `vmap`."""

from tanager.models.layers import Conv as Conv
from tanager.models.layers import GroupNorm as GroupNorm
from tanager.models.layers import Linear as Linear
from tanager.models.layers import StandardisedConv as StandardisedConv
from tanager.models.layers import standardise as standardise
from tanager.models.nf_resnet import NFResNet as NFResNet
from tanager.models.nfnet import NFNet as NFNet
from tanager.models.small_cnn import SmallCNN as SmallCNN
from tanager.models.wide_resnet import WideResNet as WideResNet
from tanager.models.zoo import MODELS as MODELS
from tanager.models.zoo import count_parameters as count_parameters
from tanager.models.zoo import create as create
