"""The operators of torch.ops.voxmma in Python, and what the kernel library offers them."""
