"""torch.nn.functional on the features of a tensor; losses take the features of a tensor as their input."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F

from voxmma.compat.MinkowskiEngine.MinkowskiTensor import Tensor

#: Functions whose result is a tensor on the same rows, and those whose result is a loss.
_ROWS = """
threshold relu hardtanh hardswish relu6 elu selu celu leaky_relu prelu rrelu glu gelu logsigmoid
hardshrink tanhshrink softsign softplus softmin softmax softshrink gumbel_softmax log_softmax tanh sigmoid
hardsigmoid silu batch_norm normalize linear dropout alpha_dropout
"""
_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss cross_entropy hinge_embedding_loss
kl_div l1_loss mse_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss
smooth_l1_loss soft_margin_loss
"""
#: Those that change what a channel is: the record of the convolution does not come along.
_NEW = ("glu", "linear")


def _on_rows(name: str) -> Callable[..., Any]:
    function = getattr(F, name)

    @functools.wraps(function)
    def on_rows(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return input._with(function(input.F, *args, **kwargs), "" if name in _NEW else name)

    return on_rows


def _loss(name: str) -> Callable[..., Any]:
    function = getattr(F, name)

    @functools.wraps(function)
    def loss(input: Tensor, target: Any, *args: Any, **kwargs: Any) -> Any:
        return function(input.F, target, *args, **kwargs)

    return loss


globals().update({name: _on_rows(name) for name in _ROWS.split()})
globals().update({name: _loss(name) for name in _LOSSES.split()})
