"""Local training: models, losses, metrics, and the trainers that turn a cohort into one sum per silo.

    what is learned    ``task``: a model, its loss and metrics (``models``, ``losses``, ``metrics``)
    what is computed   ``steps``: local training as a value; ``trainer``: the interface of all trainers
    trainers           ``loop`` (readable), ``vectorized`` (fast), ``span/`` (linear), ``dpsgd``; ``choice`` selects one
    independence       ``shapes`` and ``counters`` keep contributions in a batch apart; ``alone`` tests this in advance

Why contributions in a batch must not influence one another: docs/theory/alone-in-a-batch.md.
"""
