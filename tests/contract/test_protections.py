"""What every protection must keep: add one line to PROTECTIONS for a new one.

A protection takes one integer vector per silo and gives the server their sum; before the sum is complete
the server has nothing, and each pair of round and attempt is played once.
"""

from __future__ import annotations

from functools import cache, partial
from importlib.util import find_spec

import numpy as np
import pytest

from fedveil.crypto.paillier import PaillierPrivateKey
from fedveil.errors import ProtocolError
from fedveil.protocols.driver import LocalDriver, Transcript
from fedveil.protocols.masked_sums import MaskedSumSpec
from fedveil.protocols.partial_encryption.plan import PartialPlan
from fedveil.protocols.weighting.paillier_weights import PaillierEvaluator, PaillierKeyHolder
from fedveil.protocols.weighting.plan import WeightingPlan
from fedveil.protocols.weighting.rlwe_weights import RlweEvaluator, RlweKeyHolder
from tests.contract.plugin_members import plugin_members
from tests.opened_parties import PartialParties, WeightingParties

SILOS, LENGTH, LIMIT = 3, 5, 1000
ALL = tuple(range(SILOS))


@cache
def paillier_key():
    return PaillierPrivateKey.generate_insecure(512)


class Summing:
    """Secure aggregation, as the contract sees it."""

    tolerance = 0.0

    def __init__(self) -> None:
        self.transcript = Transcript()
        self.driver = LocalDriver(MaskedSumSpec(clients=SILOS, length=LENGTH, limit=LIMIT), self.transcript)

    def play(self, vectors, round_number, attempt=0):
        return self.driver.play((round_number, attempt), ALL, None, vectors.__getitem__)[0]


class Weighting:
    """Private weighting with one user per silo: each weight is 1, so the weighted sum is the sum."""

    tolerance = SILOS / 2

    def __init__(self, cipher: str) -> None:
        plan = WeightingPlan(
            silos=SILOS,
            users=SILOS,
            length=LENGTH,
            largest_count=6,
            norm_limit=3 * LIMIT,
            noise_limit=LIMIT,
        )
        holder, evaluator = RlweKeyHolder, RlweEvaluator
        if cipher == "paillier":
            holder = partial(PaillierKeyHolder, key=paillier_key())
            evaluator = partial(PaillierEvaluator, bits=512)
        counts = np.diag([1, 2, 1])
        self.session = WeightingParties(plan, counts, holder=holder(plan), evaluator=evaluator)
        self.transcript = self.session.transcript

    def play(self, vectors, round_number, attempt=0):
        zero = [np.zeros(LENGTH, dtype=np.int64)] * SILOS
        rows = [vector[None] for vector in vectors]
        return self.session.aggregate(round_number, zip(rows, zero, strict=True), attempt=attempt)


class PartlyEncrypted:
    """Partial encryption of two coordinates of five: the server has the sums of both parts, one in clear."""

    tolerance = 0.0

    def __init__(self) -> None:
        plan = PartialPlan(
            silos=SILOS,
            length=LENGTH,
            ratio=0.4,
            clear_limit=LIMIT,
            hidden_limit=LIMIT,
        )
        self.session = PartialParties(plan)
        self.transcript = self.session.transcript

    def play(self, vectors, round_number, attempt=0):
        found = self.session.aggregate(
            round_number,
            {silo: vector.astype(np.float64) for silo, vector in enumerate(vectors)},
            lambda silo, chosen: (vectors[silo][~chosen], vectors[silo][chosen]),
            attempt=attempt,
        )
        total = np.empty(LENGTH, dtype=np.int64)
        total[~found.partition], total[found.partition] = found.clear, found.hidden
        return total


PROTECTIONS = {
    "secure aggregation": Summing,
    "private weighting, Paillier": partial(Weighting, "paillier"),
    **plugin_members("protections"),
}
if find_spec("tenseal"):
    PROTECTIONS["private weighting, ring-LWE"] = partial(Weighting, "rlwe")
    PROTECTIONS["partial encryption"] = PartlyEncrypted
pytestmark = pytest.mark.parametrize("make", PROTECTIONS.values(), ids=PROTECTIONS)


def vectors(seed=0):
    return list(np.random.default_rng(seed).integers(-LIMIT, LIMIT + 1, (SILOS, LENGTH)))


def test_the_sum_is_right_round_after_round(make):
    protection = make()
    for round_number in (1, 2, 5):
        sent = vectors(round_number)
        found = protection.play(sent, round_number)
        assert np.abs(found - sum(sent)).max() <= protection.tolerance


def test_a_round_and_attempt_is_played_once_and_in_order(make):
    protection = make()
    protection.play(vectors(), 2, attempt=1)
    for round_number, attempt in ((2, 1), (2, 0), (1, 5)):
        with pytest.raises(ProtocolError, match="keys are used once"):
            protection.play(vectors(), round_number, attempt)
    protection.play(vectors(), 2, attempt=2)


def test_a_value_above_the_limit_is_refused_and_names_its_silo_and_not_the_value(make):
    protection = make()
    bad = vectors()
    bad[1][3] = 10 * LIMIT + 7
    with pytest.raises(ProtocolError, match="silo 1") as error:
        protection.play(bad, 1)
    assert str(10 * LIMIT + 7) not in str(error.value)


def test_every_message_is_in_the_transcript_with_its_purpose(make):
    protection = make()
    protection.play(vectors(), 1)
    lines = protection.transcript.lines
    assert {line.round for line in lines} - {0} == {1}  # 0 is the setup, which a protocol may lack
    assert all(line.purpose and line.bytes > 0 for line in lines)
    assert all("server" in (line.sender, line.recipient) or line.sender == "silo 0" for line in lines)


def test_sizes_do_not_depend_on_the_data(make):
    sizes = []
    for factor in (0, 1):
        protection = make()
        protection.play([factor * vector for vector in vectors()], 1)
        sizes.append([line.bytes for line in protection.transcript.lines])
    assert sizes[0] == sizes[1]
