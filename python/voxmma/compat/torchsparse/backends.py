"""Settings of torchsparse's kernels: accepted, without effect. voxmma.settings, policies and
voxmma.torchflags say how precisely voxmma computes."""

benchmark = False
hash_rsv_ratio = 2
allow_tf32 = True
allow_fp16 = True


def init() -> None:
    """Does nothing."""
