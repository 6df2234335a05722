"""Checksums (SHA-256) of chat templates that were read and are harmless.

They are rendered in this process; every other template gets one of its own (`cage.py`). A template
belongs here if a model that many people have brings it, and it only repeats roles and contents.
"""

KNOWN_TEMPLATES = frozenset(
    {
        # SmolLM2-Instruct, the default model
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
        # ChatML in its plainest form, which many fine-tuned models bring
        "153280e3ff55d19da1398bdb3914ee2a51b80429bfaedde11d7d216c39db80f3",
    }
)
