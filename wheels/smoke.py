"""An installed voxmma at work, on the CPU and on a GPU where there is one: run outside of the sources.

Prints one line of JSON: versions, the file of the binding, seconds of `import voxmma` behind `import torch`,
and what ran. AssertionError, or whatever voxmma raises: something is wrong.
"""

from __future__ import annotations

import json
import sys
import time

import torch


def main() -> None:
    """The test."""
    began = time.perf_counter()
    import voxmma

    seconds = time.perf_counter() - began
    from voxmma.verify import accuracy

    ran = []
    devices = ["cpu"] + ["cuda"] * (torch.cuda.is_available() and voxmma._C.HAS_CUDA)
    for device in devices:
        torch.manual_seed(0)
        axis = torch.arange(6)
        coords = torch.cartesian_prod(torch.arange(2), axis, axis, axis)[::3].int().to(device)
        for dtype in [torch.float32, torch.float16][: 1 + (device == "cuda")]:
            feats = torch.randn(len(coords), 16, device=device, dtype=dtype, requires_grad=True)
            x = voxmma.Voxels(coords, feats)
            conv = voxmma.nn.SparseConv3d(16, 32, 3).to(device, dtype)
            y = conv(x)
            weight = conv.weight.detach().reshape(27, 16, 32)
            pairs = voxmma.kernel_map(x.coord_set, 3).pairs()
            reference = accuracy.reference_conv(feats.detach(), weight, pairs, len(coords), conv.bias)
            limit = accuracy.bound(
                "fp32", 27 * 16, dtype, dtype, accuracy.arch_of(y.feats.device), offsets=27
            )
            assert accuracy.errors(y.feats.detach(), *reference).within(limit)
            net = voxmma.nn.Sequential(
                voxmma.nn.BatchNorm(32), voxmma.nn.ReLU(), voxmma.nn.SparseConv3d(32, 32, 2, stride=2)
            ).to(device, dtype)
            voxmma.nn.GlobalAvgPool()(net(y)).sum().backward()
            assert feats.grad is not None and feats.grad.isfinite().all() and feats.grad.abs().sum() > 0
            ran.append(f"{device} {str(dtype).removeprefix('torch.')}")
    found = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "voxmma": voxmma.__file__,
        "binding": voxmma._C.__file__,
        "archs": voxmma._C.CUDA_ARCHS,
        "import_seconds": round(seconds, 3),
        "ran": ran,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
