"""tanager's models, written in PyTorch: the same parameters, the same function.

Modules have the names of tanager's, so that parameters go from one to the other; the
runner checks that the losses agree. What Opacus clips by hooks must be a module that
holds its own parameters, so the class token and the positions are modules.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class StandardisedConv(nn.Conv2d):
    """A convolution whose weights are standardised; see tanager's."""

    def __init__(self, *arguments, gain=True, unit_variance=False, **options):
        super().__init__(*arguments, **options)
        self.gain = nn.Parameter(torch.ones(self.out_channels)) if gain else None
        self.unit_variance = unit_variance

    def forward(self, image):
        weight = self.weight
        axes = (1, 2, 3)
        variance, mean = torch.var_mean(weight, axes, correction=0, keepdim=True)
        fan_in = weight[0].numel()
        scale = torch.rsqrt(fan_in * (variance + 1e-8))
        if self.gain is not None:
            scale = scale * self.gain.reshape(-1, 1, 1, 1)
        if self.unit_variance:
            scale = scale * fan_in**0.5
        weight = (weight - mean) * scale
        return functional.conv2d(image, weight, self.bias, self.stride, self.padding)


def _conv(standardised, bias=True, **more):
    def make(channels_in, channels_out, side, stride=1):
        kind = StandardisedConv if standardised else nn.Conv2d
        options = more if standardised else {}
        return kind(
            channels_in, channels_out, side, stride, side // 2, bias=bias, **options
        )

    return make


class _WideBlock(nn.Module):
    def __init__(self, conv, channels_in, channels_out, stride):
        super().__init__()
        self.norm1 = nn.GroupNorm(16, channels_in)
        self.conv1 = conv(channels_in, channels_out, 3, stride)
        self.norm2 = nn.GroupNorm(16, channels_out)
        self.conv2 = conv(channels_out, channels_out, 3)
        self.shortcut = None
        if stride != 1 or channels_in != channels_out:
            self.shortcut_norm = nn.GroupNorm(16, channels_in)
            self.shortcut = conv(channels_in, channels_out, 1, stride)

    def forward(self, image):
        skip = image
        if self.shortcut is not None:
            skip = self.shortcut(self.shortcut_norm(functional.relu(image)))
        residual = self.conv1(self.norm1(functional.relu(image)))
        return skip + self.conv2(self.norm2(functional.relu(residual)))


class WideResNet(nn.Module):
    """WRN-16-4: ReLU, group norm, convolution."""

    def __init__(self, classes, standardised):
        super().__init__()
        conv = _conv(standardised)
        self.stem = conv(3, 16, 3)
        blocks, channels = [], 16
        for stage in range(3):
            for place in range(2):
                out = 64 * 2**stage
                stride = 2 if stage and not place else 1
                blocks.append(_WideBlock(conv, channels, out, stride))
                channels = out
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.GroupNorm(16, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, image):
        image = self.stem(image)
        for block in self.blocks:
            image = block(image)
        return self.head(self.norm(functional.relu(image)).mean((2, 3)))


class _BiTBlock(nn.Module):
    def __init__(self, conv, channels_in, width, stride):
        super().__init__()
        out = 4 * width
        self.norms = nn.ModuleList(
            nn.GroupNorm(32, channels) for channels in (channels_in, width, width)
        )
        self.convs = nn.ModuleList(
            [
                conv(channels_in, width, 1),
                conv(width, width, 3, stride),
                conv(width, out, 1),
            ]
        )
        changed = stride != 1 or channels_in != out
        self.shortcut = conv(channels_in, out, 1, stride) if changed else None

    def forward(self, image):
        residual = functional.relu(self.norms[0](image))
        skip = image if self.shortcut is None else self.shortcut(residual)
        residual = self.convs[0](residual)
        for norm, conv in zip(self.norms[1:], self.convs[1:], strict=True):
            residual = conv(functional.relu(norm(residual)))
        return skip + residual


class BiT(nn.Module):
    """BiT-50x1, a ResNet-v2 with group norm and weight standardisation."""

    def __init__(self, classes):
        super().__init__()
        conv = _conv(True, bias=False, gain=False, unit_variance=True)
        self.stem = conv(3, 64, 7, 2)
        stages, channels = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            blocks = []
            for place in range(count):
                stride = 2 if stage and not place else 1
                blocks.append(_BiTBlock(conv, channels, 64 * 2**stage, stride))
                channels = 256 * 2**stage
            stages.append(nn.ModuleList(blocks))
        self.stages = nn.ModuleList(stages)
        self.norm = nn.GroupNorm(32, channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, image):
        image = functional.pad(self.stem(image), (1, 1, 1, 1))
        image = functional.max_pool2d(image, 3, 2)
        for blocks in self.stages:
            for block in blocks:
                image = block(image)
        return self.head(functional.relu(self.norm(image)).mean((2, 3)))


class _ClassToken(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(width))

    def forward(self, tokens):
        first = tokens.new_zeros(tokens.shape[0], 1, tokens.shape[2]) + self.value
        return torch.cat([first, tokens], 1)


class _Positions(nn.Module):
    def __init__(self, count, width):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(count, width))

    def forward(self, tokens):
        return tokens + self.value


class _Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.heads = heads

    def forward(self, tokens, queries=None):
        batch, count, width = tokens.shape
        qkv = self.qkv(tokens).reshape(batch, count, 3, self.heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        query = query[:, :, :queries]
        output = functional.scaled_dot_product_attention(query, key, value)
        return self.projection(output.transpose(1, 2).reshape(batch, -1, width))


class _ViTBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, tokens, queries=None):
        seen = self.attention(self.norm1(tokens), queries)
        tokens = tokens[:, :queries] + seen
        return tokens + self.contract(functional.gelu(self.expand(self.norm2(tokens))))


class ViT(nn.Module):
    """A vision transformer for images of 224 pixels in patches of 16."""

    def __init__(self, classes, width, depth, heads):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.class_token = _ClassToken(width)
        self.positions = _Positions(197, width)
        self.blocks = nn.ModuleList(_ViTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, image):
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        tokens = self.positions(self.class_token(tokens))
        for block in self.blocks[:-1]:
            tokens = block(tokens)
        tokens = self.blocks[-1](tokens, queries=1)
        return self.head(self.norm(tokens[:, 0]))


class MLP(nn.Module):
    """Two hidden layers of 1024 units, or none."""

    def __init__(self, classes, features, hidden=(1024, 1024)):
        super().__init__()
        linears = []
        for units in hidden:
            linears.append(nn.Linear(features, units))
            features = units
        self.hidden = nn.ModuleList(linears)
        self.head = nn.Linear(features, classes)

    def forward(self, values):
        for linear in self.hidden:
            values = functional.relu(linear(values))
        return self.head(values)


def create(model: str, classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Return the model that tanager knows by this name."""
    match model:
        case "wrn-16-4" | "wrn-16-4-plain":
            return WideResNet(classes, standardised=model == "wrn-16-4")
        case "bit-50x1":
            return BiT(classes)
        case "vit-tiny-16":
            return ViT(classes, 192, 12, 3)
        case "vit-base-16":
            return ViT(classes, 768, 12, 12)
        case "mlp":
            return MLP(classes, *shape)
        case "mlp-small":
            return MLP(classes, *shape, hidden=(64,))
        case "linear":
            return MLP(classes, *shape, hidden=())
    raise LookupError(model)


def name_of(name: str, module: nn.Module) -> str:
    """Return what tanager calls a parameter of a module."""
    owner = module.get_submodule(name.rpartition(".")[0])
    if isinstance(owner, nn.GroupNorm | nn.LayerNorm):
        name = name.removesuffix("weight") + ("scale" if name[-6:] == "weight" else "")
    return name.removesuffix(".value")


def to_torch(array: np.ndarray) -> np.ndarray:
    """Return a parameter with its axes as PyTorch orders them."""
    if array.ndim == 4:
        return array.transpose(3, 2, 0, 1)
    return array


def from_torch(array: np.ndarray) -> np.ndarray:
    """Return a parameter with its axes as tanager orders them."""
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array


def is_transposed(name: str, array: np.ndarray) -> bool:
    """Return whether PyTorch holds this matrix the other way round."""
    return array.ndim == 2 and name.endswith("weight")
