"""Sounds: read from files, and turned into what models that listen read."""
