"""Federated learning between institutions: silo and coordinator as state machines over bytes.

The package does not open connections. A transport (Flower, files, tests) carries the bytes.

    who belongs to a federation   ``membership``; limits of one silo: ``policy``
    messages                      ``signed_message``: format and signature; ``grammar``: which message may come when
    what a run is                 ``terms``: text and rules of a run; ``session_plan``
    coordinator                   ``coordinator``, ``exchange``
    silo                          ``silo``; ``proposal_review`` checks the terms; ``silo_session/`` plays the session
    persisted state of a silo     ``store``, ``silo_ledger``, ``silo_state``; ``ledger_heads`` of the other parties
    later verification            ``audit/``

Claims and their conditions: docs/theory/federation.md.
"""
