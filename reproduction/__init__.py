"""Published tables and figures made again: what is run, what was measured, and the page that says how they compare.

``tables/NAME.toml`` says what a table runs and what was published (:mod:`~reproduction.table`); playing it
(:mod:`~reproduction.play`) adds to ``results/NAME.json`` (:mod:`~reproduction.results`); the page
(:mod:`~reproduction.page`) is made from result files alone, by the rules of
:mod:`~reproduction.verdicts`.
"""
