"""Normalisation, activations and containers on Voxels.

A layer that works row by row is torch's own layer, lifted: same arguments, parameters, state_dict, same
result on a plain tensor, and on Voxels the result is Voxels on the same coordinates.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from voxmma.nn.functional import activation, norm
from voxmma.sparse.tensor import Voxels


class BatchNorm(nn.BatchNorm1d):
    """torch.nn.BatchNorm1d over all voxels of all samples, (N, C) -> (N, C), on Voxels or a tensor.

    Arguments, parameters, buffers and state_dict are torch's. In training fewer than two voxels (N = 0
    included) leave the running statistics alone and are normalised by them; see functional.batch_norm.
    """

    def forward(self, x: Any) -> Any:
        rows = x.num_voxels if isinstance(x, Voxels) else x.shape[0]
        if rows >= 2:
            return activation.follow("BatchNorm", super().forward, x)
        mean, var = self.running_mean, self.running_var
        return norm.batch_norm(x, mean, var, self.weight, self.bias, self.training, 0.0, self.eps)


class SyncBatchNorm(BatchNorm):
    """BatchNorm with the statistics of all ranks in training, on any device and backend.

    Ranks may hold different numbers of voxels, none included. Without an initialised process group, or with
    a single rank, and in evaluation it is BatchNorm. `process_group`: default all ranks.
    """

    process_group: dist.ProcessGroup | None = None

    def forward(self, x: Any) -> Any:
        group = self.process_group
        if not self.training or not dist.is_initialized() or dist.get_world_size(group) == 1:
            return super().forward(x)
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        mean, var = self.running_mean, self.running_var
        return norm.sync_batch_norm(x, mean, var, self.weight, self.bias, momentum, self.eps, group)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> Any:
        """`module` with every BatchNorm and torch.nn.BatchNorm1d inside replaced by a SyncBatchNorm with the
        same parameters, buffers, mode and keys. torch's own conversion makes layers that take no Voxels."""
        if isinstance(module, nn.BatchNorm1d):
            made = cls(module.num_features, module.eps, module.momentum)
            for name in ("affine", "track_running_stats"):
                setattr(made, name, getattr(module, name))
            made.process_group = process_group
            made._parameters.update(module._parameters)
            made._buffers.update(module._buffers)
            return made.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_group))
        return module

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "process_group"}  # a group is of one process


class GroupNorm(nn.GroupNorm):
    """Group normalisation of Voxels, statistics per sample. Arguments, parameters and state_dict are torch's.

    See functional.group_norm. Unlike torch's, it takes no plain tensor: that would not say the samples.
    """

    def forward(self, x: Voxels) -> Voxels:  # type: ignore[override]
        return norm.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class InstanceNorm(GroupNorm):
    """Instance normalisation of Voxels: mean and variance of each sample and channel, (N, C) -> (N, C).

    Always those of the input, as in torch's layer without running statistics.

    Args:
        num_features: channels C. eps: added to the variance. affine: with weight and bias (C,).
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, num_features, eps, affine, device, dtype)
