"""More than one engine, on Ray: batch files on Ray Data, and replicas of the engine on Ray Serve.

Nothing outside of this package imports Ray.
"""
