"""Compose the methods of the published systems and their baselines from stages.

A method is built by a function that returns a :class:`Method`. The function's keyword arguments are the keys of the
table ``[method]`` of an experiment. :mod:`fedveil.registry` lists the names.

    published systems       ``uldp`` (ULDP-FL), ``dp_fed_ls`` (DP-Fed-LS), ``paraaegis``, ``cepam``; baseline ``fedavg``
    stages                  ``contributions``, ``weights``, channels (``gaussian_shares``, ``named_channels``,
                            ``client_messages``, ``correlated``), protections (``protection_stage``,
                            ``secure_aggregation``, ``private_weighting``, ``partial_encryption``)
    composition             ``method``: stages in one value; ``derive``: the guarantee of this value, per party
"""

from fedveil.methods.method import Method

__all__ = ["Method"]
