"""Compose the methods of ULDP-FL: user-level privacy when one user's records lie in several silos.

Kato, Xiong, Takagi, Cao, Yoshikawa: "ULDP-FL: Federated Learning with Across Silo User-Level Differential Privacy",
PVLDB 2024. S: silos, U: users, x: model, eta_g and eta_l: global and local learning rates, sigma: noise multiplier,
C: clip bound, Q: local epochs, q: sampling rate of users. In a round

    NAIVE  (Algorithm 1)   silo s sends clip(Delta_s, C) + N(0, sigma^2 C^2 |S|);            x <- x + eta_g (1/|S|) sum
    GROUP  (Algorithm 2)   silo s sends Delta_s of DP-SGD on at most k records of a user;    x <- x + eta_g (1/|S|) sum
    AVG    (Algorithm 3)   silo s sends sum_u w_su clip(Delta_su, C) + N(0, sigma^2 C^2 / |S|)    (lines 9 to 18)
                           x <- x + eta / (q |U|) sum, with eta = eta_g / |S|                     (line 6)
    SGD    the same, with minus one gradient for Delta_su
    -w     weights w_su = n_su / N_u (equation 3) in place of 1/|S|
    q < 1  users are sampled (Algorithm 4)

A user's weights sum to at most 1 over the silos. So adding or removing one user changes the sum of AVG and SGD by at
most C (Theorem 3), however many records the user has. docs/theory/uldp-methods.md.
"""

from __future__ import annotations

from dataclasses import replace

from fedveil.errors import CompositionError
from fedveil.methods.channels import Identity
from fedveil.methods.contributions import RecordContribution, SiloContribution, SiloUserContribution
from fedveil.methods.correlated import with_correlated_noise
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.keys import (
    ClipNorm,
    Clipping,
    Colluding,
    GroupSize,
    Local,
    Noise,
    Rounds,
    Silos,
    Stream,
    UserRate,
    WeightPower,
)
from fedveil.methods.method import Method, variant_of
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip, bound_of
from fedveil.privacy.sampling import Everyone, PoissonUsers
from fedveil.training.server.optimizers import ServerSgd
from fedveil.training.steps import LocalDpSgd, LocalGradient, check_computed


def uldp_naive(
    *,
    local: Local,
    n_silos: Silos,
    clip: ClipNorm,
    noise_multiplier: Noise,
    colluding_silos: Colluding = 0,
) -> Method:
    """ULDP-NAIVE: clip each silo's update, and add noise for a user who may be in all silos (Algorithm 1).

    Guarantee: in each round, readers of the models see one user through a Gaussian mechanism of multiplier sigma / 2.
    A clipped update changes by up to 2 C in each of |S| silos; Theorem 1 of the paper counts C.
    """
    return Method(
        name="uldp-naive",
        contribution=SiloContribution(),
        sampler=Everyone(),
        local=local,
        bound=Clip(norm=clip),
        weights=Weights.ONE,
        # Algorithm 1: |S| shares of variance sigma^2 C^2 |S| add up to (sigma |S| C)^2.
        channel=GaussianShares(
            noise_multiplier=noise_multiplier, scale=n_silos * clip, colluding_silos=colluding_silos
        ),
        server=ServerSgd(),
    )


def uldp_group(
    *,
    local: Local,
    clip: ClipNorm,
    noise_multiplier: Noise,
    group_size: GroupSize,
) -> Method:
    """ULDP-GROUP: DP-SGD in each silo, accounted for users with at most k records (Algorithm 2).

    k = ``group_size`` counts the records of all silos together. The guarantee holds for one user, however the k
    records are divided among the silos; docs/theory/group-privacy.md.

    Raises:
        CompositionError: a local step that DP-SGD does not have (momentum, weight decay, a decaying rate, a pass that
            stops early, no batch size).
    """
    check_computed(local)
    plain = not (local.momentum or local.weight_decay) and local.decay == 1 and local.steps is None
    plain = plain and not local.algorithm.changes
    if local.batch_size is None or not plain:
        raise CompositionError(
            "uldp-group: DP-SGD takes Poisson batches and plain steps at one rate; "
            "give local.batch_size, and neither momentum, weight_decay, decay, steps nor another local algorithm"
        )
    return Method(
        name=f"uldp-group-{group_size}",
        contribution=RecordContribution(per_user=group_size),
        sampler=Everyone(),
        local=LocalDpSgd(
            learning_rate=local.learning_rate,
            epochs=local.epochs,
            batch_size=local.batch_size,
            noise_multiplier=noise_multiplier,
        ),
        bound=Clip(norm=clip),
        weights=Weights.ONE,
        channel=Identity(),
        server=ServerSgd(),
    )


def _per_silo_and_user(
    *,
    local: Local | LocalGradient,
    clip: Clipping,
    noise_multiplier: Noise,
    user_sampling_rate: UserRate = 1.0,
    colluding_silos: Colluding = 0,
) -> Method:
    """Compose Algorithms 3 and 4: one contribution for each pair of silo and user, weighted 1/|S|."""
    bound = bound_of(clip)
    return Method(
        name="uldp-sgd" if local.one_gradient else "uldp-avg",
        contribution=SiloUserContribution(),
        sampler=PoissonUsers(rate=user_sampling_rate) if user_sampling_rate < 1 else Everyone(),
        local=local,
        bound=bound,
        weights=Weights.UNIFORM,
        # Algorithm 3: |S| shares of variance sigma^2 C^2 / |S| add up to (sigma C)^2.
        channel=GaussianShares(
            noise_multiplier=noise_multiplier, scale=bound.norm, colluding_silos=colluding_silos
        ),
        server=ServerSgd(),
    )


@variant_of(_per_silo_and_user, local=LocalGradient())
def uldp_sgd(pairs: Method, *, correlated: Stream = None, rounds: Rounds = None) -> Method:
    """ULDP-SGD: one clipped gradient per user and silo, instead of local training (Algorithm 3, SGD form).

    The guarantee is that of uldp-avg.
    """
    return with_correlated_noise(pairs, correlated, rounds)


@variant_of(uldp_sgd)
def uldp_sgd_w(uniform: Method, *, power: WeightPower = 1.0) -> Method:
    """ULDP-SGD-w: one clipped gradient per user and silo, weighted by records (Algorithm 3, equation 3).

    This is uldp-avg-w with one local step over all records of a contribution, at local rate 1.
    """
    return replace(uniform, name="uldp-sgd-w", weights=Weights.by_power(power))


@variant_of(_per_silo_and_user)
def uldp_avg(pairs: Method, *, correlated: Stream = None, rounds: Rounds = None) -> Method:
    """ULDP-AVG: train and clip per user and silo, each weighted 1/|S| (Algorithm 3).

    Guarantee: in each round, readers of the models see one user through a Gaussian mechanism of multiplier sigma
    (Theorem 3), Poisson-subsampled if ``user_sampling_rate`` is below 1; docs/theory/uldp-methods.md.
    """
    return with_correlated_noise(pairs, correlated, rounds)


@variant_of(uldp_avg)
def uldp_avg_w(uniform: Method, *, power: WeightPower = 1.0) -> Method:
    """ULDP-AVG-w: train and clip per user and silo, weighted n_su/N_u by records (Algorithm 3, eq. 3).

    Readers of the models have the guarantee of uldp-avg. The silos disclose record counts to compute the weights. Not
    claimed: any guarantee against the server and the silos, unless private weighting hides the counts. The weights
    are n_su^p / sum_s n_su^p with ``power`` p; the paper has p = 1.
    """
    return replace(uniform, name="uldp-avg-w", weights=Weights.by_power(power))
