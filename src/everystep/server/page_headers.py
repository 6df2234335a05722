"""The headers of pages that this program serves: what a browser may load there, and from where."""

from __future__ import annotations


def page_headers(images: str, cache: str) -> dict[str, str]:
    """Return the headers of a page whose scripts and styles come from its own server, which is all
    that it asks, and whose texts cannot become code.

    `images`: sources of pictures in the words of a Content-Security-Policy. `cache`: what
    Cache-Control says.
    """
    policy = (
        f"default-src 'none'; script-src 'self'; style-src 'self'; img-src {images}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return {
        "Content-Security-Policy": policy,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": cache,
    }
