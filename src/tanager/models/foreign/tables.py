"""Which libraries' files each architecture can be read from and written to.

A format is a list of rules (`rules`); each gives our name, theirs, and the layout. A
new architecture is one entry of `FORMATS`; loading, exporting and the Hub follow.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tanager import _validate as validate
from tanager.models.bit import BiT
from tanager.models.convnext import ConvNeXt
from tanager.models.dino import DINO
from tanager.models.efficientnet import BATCH_NORM_EPS, EfficientNetLite
from tanager.models.foreign.layouts import (
    FIRST_AXIS,
    FIRST_TWO_AXES,
    GAIN,
    LINEAR,
    POINTWISE,
    SAME,
    Table,
    scaled,
)
from tanager.models.foreign.rules import Rule, conv, linear, norm, table
from tanager.models.layers import StandardisedConv
from tanager.models.nf_resnet import IMPLEMENTATIONS, NFResNet
from tanager.models.nfnet import NFNet
from tanager.models.normaliser_free import EPS, RELU_GAMMA
from tanager.models.vit import VisionTransformer
from tanager.models.wide_resnet import WideResNet


class Format(NamedTuple):
    """From a model to its table, and tensors in files that no logit depends on.

    `batch_norm_eps` is what their batch norms add to the variance. Their four tensors
    of each are then two, see `layouts.folded`.
    """

    names: Callable[[Any], Table]
    unused: tuple[str, ...] = ()
    batch_norm_eps: float | None = None


# timm's `VisionTransformer` with a class token, a last norm before the head and no
# layer scale: ``vit_*_patch*`` of its augreg, orig and deit families.
_VIT_TIMM = (
    *conv("patches", "patch_embed.proj"),
    Rule("class_token", "cls_token", FIRST_TWO_AXES),
    Rule("positions", "pos_embed", FIRST_AXIS),
    *norm("norm", "norm"),
    *linear("head", "head"),
    *norm("blocks.{i}.norm{n}", "blocks.{i}.norm{n}"),
    *linear("blocks.{i}.attention.qkv", "blocks.{i}.attn.qkv"),
    *linear("blocks.{i}.attention.projection", "blocks.{i}.attn.proj"),
    *linear("blocks.{i}.expand", "blocks.{i}.mlp.fc1"),
    *linear("blocks.{i}.contract", "blocks.{i}.mlp.fc2"),
)


def _dino_timm(model: DINO) -> Table:
    """Return the table of a model in timm, where DINOv3 is an `Eva`.

    That has other names for the factors of branches, and two layers where we have one
    that gives the gate and what it multiplies.
    """
    v3 = model.positions is None
    rules = [Rule("registers", "reg_token", FIRST_AXIS)]
    for n in (1, 2):
        theirs = f"gamma_{n}" if v3 else f"ls{n}.gamma"
        rules += [Rule(f"blocks.{{i}}.scale{n}.gain", f"blocks.{{i}}.{theirs}", SAME)]
    if v3 and model.blocks[0].gated:
        for leaf, layout in (("weight", LINEAR), ("bias", SAME)):
            parts = "|".join(f"blocks.{{i}}.mlp.fc1_{part}.{leaf}" for part in "gx")
            rules += [Rule(f"blocks.{{i}}.expand.{leaf}", parts, layout)]
    return table((*rules, *_VIT_TIMM), model)


def _vit_huggingface(prefix: str) -> tuple[Rule, ...]:
    """Return the rules of transformers' `ViTForImageClassification`.

    All names but the head's have the prefix, none in files of a bare `ViTModel`.
    Its layer norms add 1e-12 to the variance unless configured otherwise, ours 1e-6;
    `docs/pretrained.md` says how much that changes the logits.
    """
    embeddings, layer = f"{prefix}embeddings", f"{prefix}encoder.layer.{{i}}"
    parts = [f"{layer}.attention.attention.{p}" for p in ("query", "key", "value")]
    weight, bias = ("|".join(f"{p}.{k}" for p in parts) for k in ("weight", "bias"))
    return (
        *conv("patches", f"{embeddings}.patch_embeddings.projection"),
        Rule("class_token", f"{embeddings}.cls_token", FIRST_TWO_AXES),
        Rule("positions", f"{embeddings}.position_embeddings", FIRST_AXIS),
        *norm("norm", f"{prefix}layernorm"),
        *linear("head", "classifier"),
        *norm("blocks.{i}.norm1", f"{layer}.layernorm_before"),
        Rule("blocks.{i}.attention.qkv.weight", weight, LINEAR),
        Rule("blocks.{i}.attention.qkv.bias", bias, SAME),
        *linear("blocks.{i}.attention.projection", f"{layer}.attention.output.dense"),
        *norm("blocks.{i}.norm2", f"{layer}.layernorm_after"),
        *linear("blocks.{i}.expand", f"{layer}.intermediate.dense"),
        *linear("blocks.{i}.contract", f"{layer}.output.dense"),
    )


_BIT_TIMM = (
    *conv("stem", "stem.conv"),
    *norm("norm", "norm"),
    *linear("head", "head.fc", POINTWISE),
    *conv("stages.{i}.{j}.convs.{n}", "stages.{i}.blocks.{j}.conv{n1}"),
    *norm("stages.{i}.{j}.norms.{n}", "stages.{i}.blocks.{j}.norm{n1}"),
    *conv("stages.{i}.{j}.shortcut", "stages.{i}.blocks.{j}.downsample.conv"),
)

_CONVNEXT_TIMM = (
    *conv("stem", "stem.0"),
    *norm("stem_norm", "stem.1"),
    *norm("downsamples.{i}.norm", "stages.{i1}.downsample.0"),
    *conv("downsamples.{i}.conv", "stages.{i1}.downsample.1"),
    *conv("stages.{i}.{j}.depthwise", "stages.{i}.blocks.{j}.conv_dw"),
    *norm("stages.{i}.{j}.norm", "stages.{i}.blocks.{j}.norm"),
    *linear("stages.{i}.{j}.expand", "stages.{i}.blocks.{j}.mlp.fc1"),
    *linear("stages.{i}.{j}.contract", "stages.{i}.blocks.{j}.mlp.fc2"),
    Rule("stages.{i}.{j}.scale.gain", "stages.{i}.blocks.{j}.gamma", SAME),
    *norm("norm", "head.norm"),
    *linear("head", "head.fc"),
)

# Google's ``BiT-M-R50x1.npz``: `load_from` in github.com/google-research/big_transfer,
# bit_pytorch/models.py.
_KERNEL, _NORM = "standardized_conv2d/kernel", ("group_norm/gamma", "group_norm/beta")
_UNIT = "resnet/block{i1}/unit{j1:02d}"
_BIT_GOOGLE = (
    Rule("stem.weight", f"resnet/root_block/{_KERNEL}", SAME),
    Rule("norm.scale", f"resnet/{_NORM[0]}", SAME),
    Rule("norm.bias", f"resnet/{_NORM[1]}", SAME),
    Rule("head.weight", "resnet/head/conv2d/kernel", FIRST_TWO_AXES),
    Rule("head.bias", "resnet/head/conv2d/bias", SAME),
    Rule("stages.{i}.{j}.shortcut.weight", f"{_UNIT}/a/proj/{_KERNEL}", SAME),
    *(
        Rule(f"stages.{{i}}.{{j}}.{part}", f"{_UNIT}/{letter}/{theirs}", SAME)
        for n, letter in enumerate("abc")
        for part, theirs in (
            (f"convs.{n}.weight", _KERNEL),
            (f"norms.{n}.scale", _NORM[0]),
            (f"norms.{n}.bias", _NORM[1]),
        )
    ),
)

_BLOCK = "stages.{stage}.{place}"
_NORMALISER_FREE_BLOCK = (
    *conv("blocks.{b}.conv{n}", f"{_BLOCK}.conv{{n}}"),
    *conv("blocks.{b}.conv2b", f"{_BLOCK}.conv2b"),
    *conv("blocks.{b}.shortcut", f"{_BLOCK}.downsample.conv"),
    Rule("blocks.{b}.skip_gain", f"{_BLOCK}.skipinit_gain", SAME),
)

# timm multiplies by γ in each convolution, we in each activation. The two differ where
# a convolution follows no activation (the stem, whose gain is γ times theirs) and an
# activation no convolution (the head, whose weight is theirs divided by γ).
_NF_RESNET_TIMM = (
    *conv("stem", "stem.conv", scaled(GAIN, RELU_GAMMA)),
    *_NORMALISER_FREE_BLOCK,
    *linear("head", "head.fc", scaled(LINEAR, 1 / RELU_GAMMA)),
)

_NFNET_TIMM = (
    *conv("stem.{i}", "stem.conv{i1}"),
    *_NORMALISER_FREE_BLOCK,
    *linear("blocks.{b}.attention.squeeze", f"{_BLOCK}.attn_last.fc1", POINTWISE),
    *linear("blocks.{b}.attention.expand", f"{_BLOCK}.attn_last.fc2", POINTWISE),
    *conv("last", "final_conv"),
    *linear("head", "head.fc"),
)


def _nf_resnet(rules: Iterable[Rule], implementation: str, model: NFResNet) -> Table:
    """Return the table of a model that computes what an implementation computes.

    Skip gains may differ: timm's published weights have none; its ``skipinit=True`` do.
    """
    ours = {"shortcut": "strided", "padding": "SAME", "gamma": RELU_GAMMA, "eps": EPS}
    for name, value in (ours | IMPLEMENTATIONS[implementation]).items():
        if name != "skip_gain" and getattr(model, name) != value:
            options = f'IMPLEMENTATIONS["{implementation}"]'
            rule = f"must be {value!r} for {implementation}'s weights"
            remedy = f"build the model with the options of {options}"
            validate.refuse(name, getattr(model, name), rule, remedy)
    return table(rules, model)


def _haiku(ours: str, theirs: str) -> list[Rule]:
    """Return the rules of a convolution, norm or linear layer of haiku's."""
    bias = "b" if ours.startswith(("head", _ATTENTION)) else "bias"
    return [
        Rule(f"{ours}.weight", f"{theirs}/w", SAME),
        Rule(f"{ours}.gain", f"{theirs}/gain", SAME),
        Rule(f"{ours}.scale", f"{theirs}/scale", SAME),
        Rule(f"{ours}.bias", f"{theirs}/{'offset' if 'norm' in ours else bias}", SAME),
    ]


# jax_privacy, experiments/image_classification/models: cifar.py, imagenet_nfnets.py and
# imagenet_nfresnets.py at commit 8c284ce. The released NFNets of DeepMind are alike.
_ATTENTION = "blocks.{b}.attention"
_JP_BLOCK = "wide_res_net/Block_{stage1}"
_WRN_JAX_PRIVACY = (
    *_haiku("stem", "wide_res_net/First_conv"),
    *_haiku("blocks.{b}.shortcut_norm", f"{_JP_BLOCK}_skip_norm"),
    *_haiku("blocks.{b}.shortcut", f"{_JP_BLOCK}_skip_conv"),
    *_haiku("blocks.{b}.norm1", f"{_JP_BLOCK}_norm_{{place}}_0"),
    *_haiku("blocks.{b}.conv1", f"{_JP_BLOCK}Conv_{{place}}_0"),
    *_haiku("blocks.{b}.norm2", f"{_JP_BLOCK}_norm_{{place}}_1"),
    *_haiku("blocks.{b}.conv2", f"{_JP_BLOCK}Conv_{{place}}_1"),
    *_haiku("norm", "wide_res_net/Final_norm"),
    *_haiku("head", "wide_res_net/Softmax"),
)


def _normaliser_free_haiku(block: str) -> tuple[Rule, ...]:
    return (
        *_haiku("blocks.{b}.conv1", f"{block}/~/conv0"),
        *_haiku("blocks.{b}.conv2", f"{block}/~/conv1"),
        *_haiku("blocks.{b}.conv2b", f"{block}/~/conv1b"),
        *_haiku("blocks.{b}.conv3", f"{block}/~/conv2"),
        *_haiku("blocks.{b}.shortcut", f"{block}/~/conv_shortcut"),
        Rule("blocks.{b}.skip_gain", f"{block}/skip_gain", SAME),
    )


_NF_RESNET_JAX_PRIVACY = (
    *_haiku("stem", "NF_ResNet/~/initial_conv"),
    *_normaliser_free_haiku("NF_ResNet/~/nf_res_block{haiku}"),
    *_haiku("head", "NF_ResNet/~/linear"),
)

_NFNET_BLOCK = "NFNet/~/nf_block{haiku}"
_NFNET_JAX_PRIVACY = (
    *_haiku("stem.{i}", "NFNet/~/stem_conv{i}"),
    *_normaliser_free_haiku(_NFNET_BLOCK),
    *_haiku(f"{_ATTENTION}.squeeze", f"{_NFNET_BLOCK}/~/squeeze_excite/~/linear"),
    *_haiku(f"{_ATTENTION}.expand", f"{_NFNET_BLOCK}/~/squeeze_excite/~/linear_1"),
    *_haiku("last", "NFNet/~/final_conv"),
    *_haiku("head", "NFNet/~/linear"),
)


def _wrn_jax_privacy(model: WideResNet) -> Table:
    """Return the table of a model that computes what jax_privacy computes."""
    whose = "for jax_privacy's weights"
    computed = {
        "normalisation_order": (model.order, "post-activation"),
        "padding": (model.stem.padding, "SAME"),
        "weight_standardisation": (isinstance(model.stem, StandardisedConv), True),
    }
    for name, (value, wanted) in computed.items():
        if value != wanted:
            validate.refuse(name, value, f"must be {wanted!r} {whose}")
    if model.blocks[0].shortcut is None:
        validate.refuse("width", 1, f"must be at least 2 {whose}")
    return table(_WRN_JAX_PRIVACY, model)


def _normed(ours: str, theirs: str, their_norm: str) -> list[Rule]:
    """Return the rules of a convolution and the norm after it."""
    return [*conv(ours, theirs), *norm(f"{ours}_norm", their_norm)]


# A stage's blocks in timm: {i}.{j}; the first stage has no expansion, so that its
# norms and its projection count from 1.
_LITE_TIMM = (
    *_normed("stem", "conv_stem", "bn1"),
    *_normed("stages.0.{j}.depthwise", "blocks.0.{j}.conv_dw", "blocks.0.{j}.bn1"),
    *_normed("stages.0.{j}.project", "blocks.0.{j}.conv_pw", "blocks.0.{j}.bn2"),
    *_normed("stages.{i}.{j}.expand", "blocks.{i}.{j}.conv_pw", "blocks.{i}.{j}.bn1"),
    *_normed(
        "stages.{i}.{j}.depthwise", "blocks.{i}.{j}.conv_dw", "blocks.{i}.{j}.bn2"
    ),
    *_normed("stages.{i}.{j}.project", "blocks.{i}.{j}.conv_pwl", "blocks.{i}.{j}.bn3"),
    *_normed("last", "conv_head", "bn2"),
    *linear("head", "classifier"),
)

# The package index's, whose names are those of efficientnet_pytorch.
_FLAT = "_blocks.{flat}"
_LITE_PACKAGE = (
    *_normed("stem", "_conv_stem", "_bn0"),
    *_normed("stages.{i}.{j}.expand", f"{_FLAT}._expand_conv", f"{_FLAT}._bn0"),
    *_normed("stages.{i}.{j}.depthwise", f"{_FLAT}._depthwise_conv", f"{_FLAT}._bn1"),
    *_normed("stages.{i}.{j}.project", f"{_FLAT}._project_conv", f"{_FLAT}._bn2"),
    *_normed("last", "_conv_head", "_bn1"),
    *linear("head", "_fc"),
)


def _format(rules: Iterable[Rule], *unused: str, eps: float | None = None) -> Format:
    return Format(functools.partial(table, rules), unused, eps)


FORMATS: Mapping[type, Mapping[str, Format]] = {
    VisionTransformer: {
        "timm": _format(_VIT_TIMM),
        "huggingface": _format(
            _vit_huggingface("vit."), "vit.pooler.dense.weight", "vit.pooler.dense.bias"
        ),
        "huggingface-backbone": _format(
            _vit_huggingface(""), "pooler.dense.weight", "pooler.dense.bias"
        ),
    },
    DINO: {"timm": Format(_dino_timm)},
    ConvNeXt: {"timm": _format(_CONVNEXT_TIMM)},
    WideResNet: {"jax-privacy": Format(_wrn_jax_privacy)},
    NFResNet: {
        "timm": Format(functools.partial(_nf_resnet, _NF_RESNET_TIMM, "timm")),
        "jax-privacy": Format(
            functools.partial(_nf_resnet, _NF_RESNET_JAX_PRIVACY, "deepmind")
        ),
    },
    NFNet: {"timm": _format(_NFNET_TIMM), "jax-privacy": _format(_NFNET_JAX_PRIVACY)},
    BiT: {"timm": _format(_BIT_TIMM), "google": _format(_BIT_GOOGLE)},
    EfficientNetLite: {
        "timm": _format(_LITE_TIMM, eps=BATCH_NORM_EPS),
        "efficientnet-pytorch": _format(_LITE_PACKAGE, eps=BATCH_NORM_EPS),
    },
}
"""By class of model and by name of the format, besides ``"tanager"``, our own."""
