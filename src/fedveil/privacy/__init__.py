"""Privacy: bounds, noise, samplers, events, accountants, calibration, group privacy, ledger and statement.

    what one person moves   ``bounds``, ``adaptive_clip``; ``noise/`` covers it, ``sampling`` draws who takes part
    what happened           ``events``; who learns it and what protects it: ``claims``
    what it costs           ``accounting``: ``loss_distributions`` (pld), ``renyi`` (rdp); backwards: ``calibration``
    what is written         ``ledger`` before every release, ``statement`` at the end; ``together`` for several runs

How a statement follows: docs/theory/claims.md.
"""
