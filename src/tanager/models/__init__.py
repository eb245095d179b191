"""Models for ONE image `[H, W, C]`, as Equinox modules; batching is `vmap`."""

from tanager.models.bit import BiT as BiT
from tanager.models.counts import count_flops as count_flops
from tanager.models.counts import count_parameters as count_parameters
from tanager.models.exported import Pretrained as Pretrained
from tanager.models.exported import load_pretrained as load_pretrained
from tanager.models.layers import Conv as Conv
from tanager.models.layers import GroupNorm as GroupNorm
from tanager.models.layers import Linear as Linear
from tanager.models.layers import StandardisedConv as StandardisedConv
from tanager.models.layers import standardise as standardise
from tanager.models.lenet import LeNet as LeNet
from tanager.models.pretrained import Loaded as Loaded
from tanager.models.pretrained import formats as formats
from tanager.models.pretrained import load_weights as load_weights
from tanager.models.pretrained import save_weights as save_weights
from tanager.models.published import PUBLISHED as PUBLISHED
from tanager.models.published import Published as Published
from tanager.models.resnet import ResNet as ResNet
from tanager.models.small_cnn import SmallCNN as SmallCNN
from tanager.models.wide_resnet import WideResNet as WideResNet
from tanager.models.zoo import ENTRIES as ENTRIES
from tanager.models.zoo import MODELS as MODELS
from tanager.models.zoo import ModelEntry as ModelEntry
from tanager.models.zoo import create as create
from tanager.models.zoo import find as find
