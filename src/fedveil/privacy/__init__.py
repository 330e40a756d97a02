"""Privacy: bounds, noise, samplers, events, accountants, calibration, group privacy, ledger and statement.

    sensitivity             ``bounds``, ``adaptive_clip``: how far one person can change a sum
    mechanisms              ``noise/``: exact samplers; ``sampling``: who takes part in a round
    what was released       ``events``; ``claims``: who learns it, and which event bounds it against them
    what it costs           ``accounting``: ``loss_distributions`` (pld), ``renyi`` (rdp); ``calibration``: the inverse
    what is recorded        ``ledger`` before every release, ``statement`` at the end; ``joint_cost`` for several runs

How a statement follows: docs/theory/claims.md.
"""
