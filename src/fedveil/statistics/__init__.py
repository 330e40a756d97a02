"""Statistics that count people over silos: fixed vectors, noisy sums, and figures decoded from them.

    what is asked       ``request``; ``compose`` makes a ``layout`` of ``blocks`` over ``cells``, ``plan`` predicts
    what a silo gives   ``local_vectors``: its people's vectors
    what is read        ``decoding``, then ``figures``: counts, ``moments``, ``quantiles``, ``survival`` and so on
    what is kept        ``result``; ``evaluation/`` and ``inference/`` release test metrics and regressions like it

What holds of each figure: docs/theory/statistics.md.
"""
