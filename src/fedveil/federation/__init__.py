"""A federation of institutions: silo and coordinator as state machines over bytes, whatever carries them.

    who belongs to it     ``charter``, ``membership``; a silo's own ``policy``, and its ``allowance`` for what is free
    what travels          ``signed_message``: letters; ``grammar``: which one may come when
    the coordinator       ``coordinator``, with its ``exchange``, ``rounds``, ``release_rounds``; ``opening`` begins it
    a silo                ``silo``, which judges ``proposals``, and plays in ``own/`` what it agrees to
    what is kept          ``store``, ``silo_ledger``, ``books``, and the ``heads`` of others' ledgers
    who checks it later   ``audit/``

Claims and their conditions: docs/theory/federation.md.
"""
