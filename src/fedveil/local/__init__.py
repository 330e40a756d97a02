"""Local training: models, losses, metrics, and the trainers that turn a cohort into one sum per silo.

    what is learned    ``task``: a model, its loss and metrics (``models``, ``losses``, ``metrics``)
    what is computed   ``steps``: local training as a value; ``trainer``: what every trainer is asked for and gives
    who computes it    ``loop`` readably, ``vectorized`` fast, ``span/`` for linear ones, ``dpsgd``; ``choice`` chooses
    beside whom        ``shapes`` and ``counters`` keep contributions apart; ``alone`` tries it before training

Why a contribution is alone in a batch: docs/theory/alone-in-a-batch.md.
"""
