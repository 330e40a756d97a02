"""Methods: published systems and their baselines, each a composition of stages.

A method is one function that returns a :class:`Method`; its keyword arguments are the keys of an experiment's table
``[method]``. :mod:`fedveil.registry` has the names.
"""

from fedveil.methods.method import Method

__all__ = ["Method"]
