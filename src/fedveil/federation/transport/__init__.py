"""Transports: how signed messages get from the coordinator to the silos and back.

:mod:`~.interface` is the seam, :mod:`~.exchange_loop` the one loop that every transport serves. ``https/`` is the
built-in transport; ``bridge``, with ``bridge_flower`` and ``bridge_nvflare``, carries messages through Flower or
NVFlare. No guarantee depends on a transport: messages are signed, numbered and bound to a session.

``flower`` and ``nvflare`` carry no messages of a federation: they are parts for Flower apps and NVFlare jobs of your
own. ``silo_account`` clips, noises and accounts for the NVFlare filter.
"""
