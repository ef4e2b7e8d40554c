"""Sparse tensors: coordinates, kernel maps, operations on sets of coordinates."""
