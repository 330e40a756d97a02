"""Train locally: models, losses, metrics, and the trainers that turn a cohort into one sum per silo.

    task          ``task``: a model with its loss and metrics (``models``, ``losses``, ``metrics``)
    local steps   ``steps``: the computation of one contribution; ``trainer``: the interface of all trainers
    trainers      ``loop`` (readable), ``vectorized`` (fast), ``gram/`` (linear models), ``dpsgd``; ``trainer_choice``
    independence  ``shapes`` and ``counters`` keep contributions independent; ``batch_independence`` tests this first

docs/theory/batch-independence.md explains why contributions in one batch must not influence one another.
"""
