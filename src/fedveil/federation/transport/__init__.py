"""Transports: how signed messages get from the coordinator to the silos and back.

:mod:`~.interface` is the seam, :mod:`~.exchange_loop` the one loop that every transport serves. ``https/`` is the
built-in transport. No guarantee depends on a transport: messages are signed, numbered and bound to a session.
"""
