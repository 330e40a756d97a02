"""A federation between institutions, carried by Flower's deployment runtime: its SuperLink app, TLS, node keys.

What the parties say to one another is :mod:`fedveil.federation`; here a federation is created (``enrollment/``), its
parties are served at their hosts (``coordinator_host/``, ``silo_host/``), and letters are carried between them. An
app of one's own may take :mod:`~fedveil.flower.mods` and :mod:`~fedveil.flower.strategies`. Needs ``pip install
fedveil[federation]``.
"""
