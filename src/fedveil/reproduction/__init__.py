"""Published tables and figures made again: what is run, what was measured, and the page that says how they compare.

``tables/NAME.toml`` says what a table runs and what was published (:mod:`~fedveil.reproduction.table`); playing it
(:mod:`~fedveil.reproduction.play`) adds to ``results/NAME.json`` (:mod:`~fedveil.reproduction.results`); the page
(:mod:`~fedveil.reproduction.page`) is made from result files alone, by the rules of
:mod:`~fedveil.reproduction.verdicts`.
"""
