"""Local training: models, losses, metrics, and the trainers that turn a cohort into one sum per silo.

    what is learned    ``task``: a model, its loss and metrics (``models``, ``losses``, ``metrics``)
    what is computed   ``steps``: local training as a value; ``trainer``: the interface of all trainers
    trainers           ``loop`` (readable), ``vectorized`` (fast), ``gram/`` (linear), ``dpsgd``; see ``trainer_choice``
    independence       ``shapes`` and ``counters`` keep contributions apart; ``batch_independence`` tests it in advance

Why contributions in a batch must not influence one another: docs/theory/alone-in-a-batch.md.
"""
