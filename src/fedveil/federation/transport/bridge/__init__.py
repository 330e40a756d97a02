"""Bridges: messages travel by the connections of another system, Flower or NVFlare, that the institutions run already.

The modules here run inside that system's processes. They import the standard library, that system and one another, so
that they can be copied into an app or a job where fedveil is not installed.
"""
