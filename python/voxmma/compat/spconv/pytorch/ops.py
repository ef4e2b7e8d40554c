"""spconv.pytorch.ops: sizes of outputs. Its products over index pairs are not here."""

from __future__ import annotations

from collections.abc import Sequence

from voxmma.compat.spconv.core import ConvAlgo as ConvAlgo
from voxmma.compat.spconv.core import missing


def get_conv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """floor((n + 2 * padding - dilation * (kernel_size - 1) - 1) / stride) + 1 per axis."""
    axes = zip(input_size, kernel_size, stride, padding, dilation, strict=True)
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes]


def get_deconv_output_size(
    input_size: Sequence[int],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:
    """(n - 1) * stride - 2 * padding + kernel_size + output_padding per axis; dilation does not count, as
    there."""
    axes = zip(input_size, kernel_size, stride, padding, output_padding, strict=True)
    return [(n - 1) * s - 2 * p + k + more for n, k, s, p, more in axes]


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.ops", name))
