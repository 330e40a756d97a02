"""The private weighting protocol: a silo's step against one full-size power per user and parameter, how it grows with
parameters and users, and deep models.

Settings are those of the ULDP-FL paper where it has them: 20 users, 3 silos, 16 parameters, 3072-bit
Paillier, N_max 2000, precision P = 1e-10. Peers: (i) one full-size power per user and parameter by gmpy2,
(ii) the ``phe`` package as the authors' program uses it (if installed). Both are measured on a part of
their powers and scaled up to all of them, and so is said in the case. CPU seconds of one core; the first
row gives the speed of this machine's modular multiplication.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
from gmpy2 import mpz, powmod

from benchmarks.harness import Row, at_most, cpu_seconds, extra_peak_megabytes
from benchmarks.weighting_curves import curves
from benchmarks.weighting_silo import (
    GRID,
    KEY_BITS,
    Silo,
    contributions,
    key,
    paillier_evaluator,
    plan_of,
    timed,
)
from fedveil.errors import ProtocolError
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.weighting.paillier_weights import PaillierKeyHolder, choose_layout
from fedveil.protocols.weighting.plan import CipherSizes, WeightedInputs, WeightingPlan
from fedveil.protocols.weighting.protocol_spec import PrivateWeightingSpec
from fedveil.protocols.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder


def rows(quick: bool) -> Iterator[Row]:
    """Measure the paper's default setting and a slope; without ``quick`` also curves, the CNN and deep models."""
    yield Row(
        case="one multiplication modulo a 6144-bit number (8.5 on an idle 2.5 GHz core)",
        unit="us",
        ours=_unit(),
    )
    yield from _paper_setting()
    yield from _slope()
    if quick:
        yield from _deep(length=20_000, largest_count=64)
        for silos, each in ((2, 10_000), (3, 10_000), (4, 10_000), (5, 100)):
            yield from _deep(length=20_000, largest_count=silos * each, silos=silos, powers_of_ten=True)
        return
    yield from curves()
    yield _network()
    yield from _deep(length=10**6, largest_count=16, target=20.0)
    yield from _deep(length=10**6, largest_count=64, target=20.0)
    memory = extra_peak_megabytes(_prepare_deep, 10**6, 64)
    yield at_most(
        "ring-LWE, 1,000,000 parameters, 100 users, N_max 64: memory of a silo", "MB", memory, 4096.0
    )
    yield from _deep(length=11_200_000, largest_count=16)


def smallest() -> Iterator[Row]:
    """Play a silo's rounds for few users, a few coordinates and small counts."""
    plan = plan_of(users=2, length=2, largest_count=6)
    silo = Silo.of(plan, PaillierKeyHolder(plan, key()), paillier_evaluator)
    yield Row(case="2 users, 2 parameters: first round", unit="CPU s", ours=timed(silo.first)[1])
    yield Row(case="2 users, 2 parameters: of all parties", unit="CPU s", ours=_whole(plan))
    yield from _deep(users=2, length=20, largest_count=4)


def _unit() -> float:
    modulus = mpz(secrets.randbits(6144)) | 1
    value = mpz(secrets.randbits(6143))

    def multiply() -> None:
        current = value
        for _ in range(10_000):
            current = current * value % modulus

    return min(timed(multiply)[1] for _ in range(3)) * 100.0


def _paper_setting() -> Iterator[Row]:
    plan = plan_of(users=20, length=16, largest_count=2000)
    case = "20 users, 16 parameters, 3072 bits, N_max 2000"
    silo = Silo.of(plan, PaillierKeyHolder(plan, key()), paillier_evaluator)
    peers = {"one full power each (16 of 320 measured)": (_full_powers, 20)}
    if find_spec("phe"):
        peers["phe (8 of 320 measured)"] = (_phe_products(), 40)
    first, *others = cpu_seconds(silo.first, *(peer for peer, _ in peers.values()), repeats=3)
    for (name, (_, factor)), seconds in zip(peers.items(), others, strict=True):
        yield _seconds(f"{case}: first round; peer: {name}", first, 0.8, seconds * factor)
    later, powers = cpu_seconds(silo.step, _full_powers, repeats=5)
    yield _seconds(f"{case}: later round; peer: one full power each", later, 0.15, powers * 20)
    packed = plan_of(users=20, length=16, largest_count=100)
    silo = Silo.of(packed, PaillierKeyHolder(packed, key()), paillier_evaluator)
    first, powers = cpu_seconds(silo.first, _full_powers, repeats=5)
    slots = choose_layout(packed, KEY_BITS).slots
    name = f"the same with N_max 100, {slots} coordinates packed: first round; peer: one full power each"
    yield _seconds(name, first, 0.2, powers * 20)
    yield at_most(f"{case}: first round of all parties with setup", "CPU s", _whole(plan), 4.0)


def _seconds(case: str, ours: float, target: float, peer: float) -> Row:
    return Row(
        case=case, unit="CPU s", ours=ours, peer=peer, ratio=peer / ours, target=target, met=ours <= target
    )


def _full_powers() -> None:
    square = key().public.square
    base = square // 3
    total = mpz(1)
    for _ in range(16):
        total = total * powmod(base, secrets.randbits(KEY_BITS - 1), square) % square


def _phe_products() -> Callable[[], None]:
    from phe import PaillierPublicKey

    public = PaillierPublicKey(int(key().public.n))
    encrypted = public.encrypt(1)

    def products() -> None:
        total = encrypted
        for _ in range(8):
            total = total + encrypted * int(secrets.randbelow(public.n // 3))

    return products


def _whole(plan: WeightingPlan) -> float:
    rng = np.random.default_rng(1)
    counts = rng.integers(1, plan.count_limit + 1, (plan.silos, plan.users))

    def run() -> None:
        agreed = PrivateWeightingSpec(
            plan=plan,
            counts=counts,
            cipher=SimpleNamespace(
                holder=lambda plan: PaillierKeyHolder(plan, key()),
                evaluator=paillier_evaluator,
                sizes=lambda _: CipherSizes(key=1, number=1, weight=1, ciphertext=1, ciphertexts=1),
            ),
        )
        zero = np.zeros(plan.length, dtype=np.int64)
        given = [
            WeightedInputs(contributions=contributions(rng, plan), noise=zero) for _ in range(plan.silos)
        ]
        LocalDriver(agreed).play((1, 0), tuple(range(plan.silos)), None, given.__getitem__)

    return timed(run)[1]


def _slope() -> Iterator[Row]:
    """Cost per user and parameter at 100 users: the difference of two sizes, re-randomisation included."""
    sizes, seconds = (200, 1000), []
    for length in sizes:
        plan = plan_of(users=100, length=length, largest_count=64, rounds=10)
        silo = Silo.of(plan, PaillierKeyHolder(plan, key()), paillier_evaluator)
        silo.evaluator.load([silo.weights[0]] * 100, [3] * 100)  # any bases cost the same here
        seconds.append(timed(silo.step)[1])
    slope = (seconds[1] - seconds[0]) / (100 * (sizes[1] - sizes[0])) * 1e3
    yield at_most("slope at 100 users per (user, parameter), 200 to 1000 parameters", "ms", slope, 0.06)


def _network() -> Row:
    plan = plan_of(users=100, length=21_840, largest_count=64, silos=5, unit=GRID)
    silo = Silo.of(plan, PaillierKeyHolder(plan, key()), paillier_evaluator)
    _, loading = timed(silo.load)
    _, stepping = timed(silo.step)
    return at_most(
        "CNN of 21,840 parameters, 100 users, N_max 64, Paillier: a silo's first round",
        "CPU s",
        loading + stepping,
        300.0,
    )


def _deep(
    *,
    length: int,
    largest_count: int,
    target: float | None = None,
    users: int = 100,
    silos: int = 4,
    powers_of_ten: bool = False,
) -> Iterator[Row]:
    plan = plan_of(
        users=users,
        length=length,
        largest_count=largest_count,
        silos=silos,
        unit=GRID,
        powers_of_ten=powers_of_ten,
    )
    holder = RlweKeyHolder(plan)
    silo = Silo.of(plan, holder, RlweEvaluator)
    _, loading = timed(silo.load)
    blocks, stepping = timed(silo.step)
    size = sum(map(len, blocks))
    chosen = holder.parameters
    case = (
        f"ring-LWE, {length:,} parameters, {users} users, {silos} silos, N_max {largest_count}"
        f"{' in powers of ten' if powers_of_ten else ''} (N = {chosen.ring.degree}, "
        f"{chosen.plain_count} primes of {chosen.plain_bits} bits)"
    )
    met = None if target is None else stepping <= target
    yield Row(
        case=f"{case}: a silo's round, flooding included", unit="CPU s", ours=stepping, target=target, met=met
    )
    yield Row(case=f"{case}: taking {users} fresh weights", unit="CPU s", ours=loading)
    yield Row(case=f"{case}: what a silo sends", unit="MB", ours=size / 1e6)
    holder.begin()
    holder.add(blocks)
    plain = [os.urandom(32)]
    _, opening = timed(lambda: _open(holder, plain))
    yield Row(case=f"{case}: the server's decryption", unit="CPU s", ours=opening)


def _open(holder: RlweKeyHolder, seeds: list[bytes]) -> None:
    """Decrypt; the masks of the silos that were stood in for do not cancel, so the range check must fail."""
    try:
        holder.open(seeds)
    except ProtocolError:
        return


def _prepare_deep(length: int, largest_count: int) -> Callable[[], object]:
    plan = plan_of(users=100, length=length, largest_count=largest_count, silos=4, unit=GRID)
    silo = Silo.of(plan, RlweKeyHolder(plan), RlweEvaluator)

    return silo.first
