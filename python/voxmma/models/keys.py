"""Names of other projects' parameters as those of voxmma.models, for `voxmma.convert.load(..., rename=)`.

Each function takes a key of the network itself: what a training script put before it (`module.`, `backbone.`,
`backbone_3d.`) and the keys of other parts of the model are to be taken off first. A key that is not known
comes back as it is, and `load` reports it as unexpected.
"""

from __future__ import annotations

import re

#: Inside of a residual block: conv1, bn1 or norm1, ReLU, conv2, bn2 or norm2 are 0 to 4 of its body.
_BLOCK = {
    "conv1": "body.0",
    "bn1": "body.1",
    "norm1": "body.1",
    "conv2": "body.3",
    "bn2": "body.4",
    "norm2": "body.4",
    "proj": "shortcut",
    "downsample": "shortcut",
    "main": "body",
    "shortcut": "shortcut",
}


def _in_block(rest: str) -> str:
    """'conv1.weight' -> 'body.0.weight'."""
    name, dot, leaf = rest.partition(".")
    return _BLOCK.get(name, name) + dot + leaf


def pointcept_spunet(key: str) -> str:
    """Pointcept's SpUNet-v1m1, for `spunet`; layout 'spconv'."""
    if found := re.fullmatch(r"(enc|dec)\.(\d+)\.block(\d+)\.(.+)", key):
        part, level, number, rest = found.groups()
        return f"{part}oder.{level}.{number}.{_in_block(rest)}"
    return re.sub(r"^final\.", "head.", re.sub(r"^conv_input\.", "stem.0.", key))


def minkowski_minkunet(key: str) -> str:
    """MinkowskiEngine's MinkUNets of basic blocks, for `minkunet`; layout 'minkowski'."""
    key = key.replace(".bn.", ".")
    if found := re.fullmatch(r"block([1-8])\.(\d+)\.(.+)", key):
        stage, number, rest = int(found[1]), found[2], _in_block(found[3])
        return f"encoder.{stage - 1}.{number}.{rest}" if stage < 5 else f"decoder.{8 - stage}.{number}.{rest}"
    if found := re.fullmatch(r"(conv|bn|convtr|bntr)(\d)(?:p\d+s\d)?\.(.+)", key):
        kind, number, leaf = found[1], int(found[2]), found[3]
        layer = 0 if kind.startswith("conv") else 1
        if kind.endswith("tr"):
            return f"up.{7 - number}.{layer}.{leaf}"
        return f"down.{number - 1}.{layer}.{leaf}" if number else f"stem.0.{layer}.{leaf}"
    return re.sub(r"^final\.", "head.", key)


def torchsparse_resunet(key: str) -> str:
    """torchsparse's SparseResUNet42, for `resunet42`; layout 'torchsparse'."""
    if found := re.fullmatch(r"stem\.(\d)\.(.+)", key):
        return "stem.{}.{}.{}".format(*divmod(int(found[1]), 3), found[2])
    if found := re.fullmatch(r"encoders\.(\d)\.0\.(.+)", key):
        return f"down.{found[1]}.{found[2]}"
    if found := re.fullmatch(r"encoders\.(\d)\.(\d)\.(.+)", key):
        return f"encoder.{found[1]}.{int(found[2]) - 1}.{_in_block(found[3])}"
    if found := re.fullmatch(r"decoders\.(\d)\.upsample\.(.+)", key):
        return f"up.{3 - int(found[1])}.{found[2]}"
    if found := re.fullmatch(r"decoders\.(\d)\.fuse\.(\d)\.(.+)", key):
        return f"decoder.{3 - int(found[1])}.{found[2]}.{_in_block(found[3])}"
    return key


def torchsparse_resnet(key: str) -> str:
    """torchsparse's SparseResNet21D, for `ResNet21D`; layout 'torchsparse'."""
    stage, number, rest = key.split(".", 2) if key.count(".") >= 2 else ("", "", "")
    return f"stages.{stage}.{number}.{_in_block(rest)}" if stage.isdecimal() else key


def openpcdet_second(key: str) -> str:
    """OpenPCDet's VoxelBackBone8x, for `SECONDBackbone`; layout 'spconv'."""
    if found := re.fullmatch(r"conv([1-4])\.(.+)", key):
        return f"levels.{int(found[1]) - 1}.{found[2]}"
    return re.sub(r"^conv_out\.", "out.", re.sub(r"^conv_input\.", "stem.", key))


def minkowski_vae(key: str) -> str:
    """`decoder` of MinkowskiEngine's examples/vae.py, for `VAEDecoder`; layout 'minkowski'."""
    key = key.replace(".bn.", ".")
    if found := re.fullmatch(r"block(\d)_cls\.(.+)", key):
        return f"heads.{int(found[1]) - 1}.{found[2]}"
    if found := re.fullmatch(r"block(\d)\.(\d+)\.(.+)", key):
        block, layer = int(found[1]), int(found[2])
        second, layer = divmod(layer, 6)  # block1 holds two levels
        return f"levels.{block - 1 + (block > 1) + second}.{layer}.{found[3]}"
    return key
