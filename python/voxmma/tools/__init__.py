"""The `voxmma` command and what is behind it; needs voxmma[cli]."""
