"""A federation between institutions, carried by Flower's deployment runtime: SuperLink, SuperNodes, TLS, node keys.

What the parties say to one another is :mod:`fedveil.engine.federation`; this room sets a federation up, starts Flower's
own processes and carries letters between them. Needs ``pip install fedveil[federation]``.
"""
