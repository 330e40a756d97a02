"""Bound, add noise, sample, account, calibrate and record: the differential privacy of fedveil.

    sensitivity             ``bounds``, ``adaptive_clip``: how far a unit changes a sum
    mechanisms              ``noise``: exact samplers; ``rounding``; ``sampling``: the users of a round
    released information    ``events``; ``claims``: each party's knowledge and the event that bounds it
    cost                    ``accounting``: ``loss_distributions`` (pld), ``renyi`` (rdp); ``calibration``: inverse
    records                 ``ledger`` before every release, ``statement`` at the end; ``joint_cost`` for several runs

How the statement is derived from messages and claims: docs/theory/claims.md.
"""
