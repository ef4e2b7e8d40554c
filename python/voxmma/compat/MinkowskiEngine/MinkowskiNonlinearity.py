"""torch.nn's activations and dropouts on the features: `module` is torch's layer, with its arguments."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import Tensor

_T = TypeVar("_T", bound=Tensor)


class MinkowskiNonlinearityBase(MinkowskiModuleBase):
    MODULE: type[nn.Module]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.MODULE(*args, **kwargs)

    def forward(self, input: _T) -> _T:
        return input._with(self.module(input.F), type(self.module).__name__)

    def __repr__(self) -> str:
        return type(self).__name__ + "()"


class MinkowskiELU(MinkowskiNonlinearityBase):
    MODULE = nn.ELU


class MinkowskiHardshrink(MinkowskiNonlinearityBase):
    MODULE = nn.Hardshrink


class MinkowskiHardsigmoid(MinkowskiNonlinearityBase):
    MODULE = nn.Hardsigmoid


class MinkowskiHardtanh(MinkowskiNonlinearityBase):
    MODULE = nn.Hardtanh


class MinkowskiHardswish(MinkowskiNonlinearityBase):
    MODULE = nn.Hardswish


class MinkowskiLeakyReLU(MinkowskiNonlinearityBase):
    MODULE = nn.LeakyReLU


class MinkowskiLogSigmoid(MinkowskiNonlinearityBase):
    MODULE = nn.LogSigmoid


class MinkowskiPReLU(MinkowskiNonlinearityBase):
    MODULE = nn.PReLU


class MinkowskiReLU(MinkowskiNonlinearityBase):
    MODULE = nn.ReLU


class MinkowskiReLU6(MinkowskiNonlinearityBase):
    MODULE = nn.ReLU6


class MinkowskiRReLU(MinkowskiNonlinearityBase):
    MODULE = nn.RReLU


class MinkowskiSELU(MinkowskiNonlinearityBase):
    MODULE = nn.SELU


class MinkowskiCELU(MinkowskiNonlinearityBase):
    MODULE = nn.CELU


class MinkowskiGELU(MinkowskiNonlinearityBase):
    MODULE = nn.GELU


class MinkowskiSigmoid(MinkowskiNonlinearityBase):
    MODULE = nn.Sigmoid


class MinkowskiSiLU(MinkowskiNonlinearityBase):
    MODULE = nn.SiLU


class MinkowskiSoftplus(MinkowskiNonlinearityBase):
    MODULE = nn.Softplus


class MinkowskiSoftshrink(MinkowskiNonlinearityBase):
    MODULE = nn.Softshrink


class MinkowskiSoftsign(MinkowskiNonlinearityBase):
    MODULE = nn.Softsign


class MinkowskiTanh(MinkowskiNonlinearityBase):
    MODULE = nn.Tanh


class MinkowskiTanhshrink(MinkowskiNonlinearityBase):
    MODULE = nn.Tanhshrink


class MinkowskiThreshold(MinkowskiNonlinearityBase):
    MODULE = nn.Threshold


class MinkowskiSoftmin(MinkowskiNonlinearityBase):
    MODULE = nn.Softmin


class MinkowskiSoftmax(MinkowskiNonlinearityBase):
    MODULE = nn.Softmax


class MinkowskiLogSoftmax(MinkowskiNonlinearityBase):
    MODULE = nn.LogSoftmax


class MinkowskiDropout(MinkowskiNonlinearityBase):
    MODULE = nn.Dropout


class MinkowskiAlphaDropout(MinkowskiNonlinearityBase):
    MODULE = nn.AlphaDropout


class MinkowskiSinusoidal(MinkowskiModuleBase):
    """sin(x @ kernel + bias) * coef, (N, in_channel) to (N, out_channel)."""

    def __init__(self, in_channel: int, out_channel: int) -> None:
        super().__init__()
        self.in_channel, self.out_channel = in_channel, out_channel
        self.kernel = nn.Parameter(torch.rand(in_channel, out_channel, device=None, dtype=None))
        self.bias = nn.Parameter(torch.rand(1, out_channel, device=None, dtype=None))
        self.coef = nn.Parameter(torch.rand(1, out_channel, device=None, dtype=None))

    def forward(self, input: _T) -> _T:
        return input._with(torch.sin(input.F @ self.kernel + self.bias) * self.coef)
