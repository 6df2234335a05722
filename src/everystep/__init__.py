"""Text generation you can see, steer and trust at every step.

The public names, sorted, and nothing else; each is documented where it is defined.
"""

from __future__ import annotations

from everystep._version import __version__

__all__ = ["__version__"]
