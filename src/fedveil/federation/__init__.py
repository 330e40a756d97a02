"""A federation of institutions: silo and coordinator as state machines over bytes, whatever carries them.

    who belongs to it     ``charter``, ``membership``; a silo's own ``policy``, and its ``cpu_quota`` for what is free
    what travels          ``signed_message``: letters; ``grammar``: which one may come when
    the coordinator       ``coordinator``, ``exchange``, ``training_rounds``, ``release_rounds``, ``coordinator_setup``
    a silo                ``silo``, which judges ``proposal_review``, and plays in ``silo_session/`` what it agrees to
    what is kept          ``store``, ``silo_ledger``, ``silo_state``, and the ``ledger_heads`` of others' ledgers
    who checks it later   ``audit/``

Claims and their conditions: docs/theory/federation.md.
"""
