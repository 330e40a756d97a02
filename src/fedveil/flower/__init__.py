"""A federation between institutions, carried by Flower's deployment runtime: its SuperLink app, TLS, node keys.

What the parties say to one another is :mod:`fedveil.federation`; this room sets a federation up, serves its
parties and carries letters between them. Needs ``pip install fedveil[federation]``.
"""
