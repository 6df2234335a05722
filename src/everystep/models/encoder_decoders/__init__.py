"""Families with an encoder and a decoder, each one file on the network of `network.py`."""
