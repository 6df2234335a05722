"""Layers over leading dimensions: plain functions and small frozen values that hold tensors."""
