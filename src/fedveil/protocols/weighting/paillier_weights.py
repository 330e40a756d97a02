"""Compute private weighting under Paillier: the server's key holder and the silo's evaluator.

A silo raises Enc(B_u) to the power r_u C once. The result encrypts the small integer C / N_u, because
B_u = (r_u N_u)^-1. Each coordinate then needs only the short exponent n_{s,u} y_{s,u,j}. Several coordinates may
share one plaintext; :func:`choose_layout` chooses their number by counting modular multiplications.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from threading import Thread
from typing import Any, Final, TypeVar

import numpy as np
from gmpy2 import gcd, get_context, mpz, powmod
from jaxtyping import Float64, Int64

from fedveil.crypto.masks import UniformIntegers
from fedveil.crypto.paillier import (
    PaillierPrivateKey,
    PaillierPublicKey,
    Rerandomizer,
    SimultaneousPowers,
    straus_cost,
)
from fedveil.errors import CryptoError, ProtocolError
from fedveil.protocols.weighting.plan import Contributions, WeightingPlan

# --- threads ------------------------------------------------------------------------------------------------
# Compute with big integers on all cores: gmpy2 releases the interpreter's lock during a power.


_T = TypeVar("_T")


def in_threads(function: Callable[..., _T], *columns: Iterable[Any]) -> list[_T]:
    """Return ``[function(*row) for row in zip(*columns)]``, computed in one thread per core.

    Threads pay for calls that are full-size powers (milliseconds). Single multiplications modulo a 6144-bit number
    take longer in two threads than in one, because passing the lock costs more than a multiplication. The threads end
    with the call, so a process that forks later has none of them. They are daemons, so an exiting process does not
    wait.
    """
    rows = list(zip(*columns, strict=True))
    count = min(len(rows), os.cpu_count() or 1)
    if count < 2:
        return [function(*row) for row in rows]
    results: dict[int, _T] = {}
    failed: list[BaseException] = []
    # next() of a range iterator is atomic, so each index goes to one thread.
    remaining = iter(range(len(rows)))

    def work() -> None:
        get_context().allow_release_gil = True  # each thread has its own gmpy2 context
        try:
            for index in remaining:
                if failed:
                    return
                results[index] = function(*rows[index])
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=work, name="fedveil-powers", daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return [results[index] for index in range(len(rows))]


# --- weights ------------------------------------------------------------------------------------------------


MaskKeys = Sequence[tuple[bytes, bool]]
"""Keys of pairwise masks, each with True if this silo adds the mask and its peer subtracts it."""

_RERANDOMIZE: Final = 66  # multiplications per outgoing ciphertext: 512 bits in windows of 8, mask, plaintext
_DECRYPT: Final = 0.3  # cost of a decryption relative to a power with a full-size exponent


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Packing of coordinates into plaintexts, and the way in which a silo computes powers.

    Attributes:
        slots: number of coordinates per plaintext.
        direct: True for powers of Enc(B_u) with full-size exponents, False for short powers of Enc(C / N_u).
        cost: estimated number of modular multiplications per round, over all silos and the server's decryption.
    """

    slots: int
    direct: bool
    cost: float


def choose_layout(plan: WeightingPlan, modulus_bits: int) -> Layout:
    """Return the layout with the least total work of all parties for a modulus of a given size.

    The cost of a silo's round has three terms: the bases (one full-size power per user, spread over the rounds that
    the bases serve), the products (Straus's algorithm), and 66 multiplications per outgoing ciphertext. The server's
    cost is one decryption per ciphertext. Packing k coordinates divides the number of ciphertexts by k and lengthens
    the exponents to k slots. Packing therefore pays for few coordinates and does not pay beyond some dozens.

    Raises:
        ProtocolError: a plaintext cannot hold even one coordinate.
    """
    plan.require(2 ** (modulus_bits - 1), f"a Paillier key of {modulus_bits} bits")
    served = 1 if plan.renewed else plan.rounds
    layouts = []
    for slots in range(1, min(plan.coordinates, (modulus_bits - 2) // plan.slot_bits) + 1):
        ciphertexts = math.ceil(plan.coordinates / slots)
        sending = ciphertexts * _RERANDOMIZE
        opening = ciphertexts * (plan.silos + _DECRYPT * modulus_bits)
        for direct in (False, True):
            bits = modulus_bits if direct else exponent_bits(plan, slots)
            products = straus_cost(
                bases=plan.users,
                bits=bits + (not direct),
                products=served * ciphertexts,
                modulus_bits=2 * modulus_bits,
            ).total(served * ciphertexts)
            bases = 0 if direct else plan.users * modulus_bits
            cost = plan.silos * (sending + (products + bases) / served) + opening
            layouts.append(Layout(slots=slots, direct=direct, cost=cost))
    return min(layouts, key=lambda layout: layout.cost)


def exponent_bits(plan: WeightingPlan, slots: int) -> int:
    """Return the number of bits of a packed exponent without its sign."""
    return plan.exponent_bits + (slots - 1) * plan.slot_bits + (slots > 1)


class PaillierKeyHolder:
    """Server's side: it encrypts weights, adds the silos' ciphertexts and decrypts the sum.

    Args:
        plan: public numbers of the run.
        key: private key of the server.

    Raises:
        ProtocolError: the modulus is too small for the sums.
    """

    def __init__(self, plan: WeightingPlan, key: PaillierPrivateKey) -> None:
        self._plan, self._key = plan, key
        self._layout = choose_layout(plan, key.public.bits)
        self._blocks: list[mpz] = []

    @property
    def modulus(self) -> int:
        """Plaintext modulus n."""
        return int(self._key.public.n)

    @property
    def public(self) -> bytes:
        """Public key for the silos: the modulus n, big-endian."""
        return int(self._key.public.n).to_bytes(self._key.public.plaintext_bytes, "big")

    def encrypt(self, weights: Sequence[int]) -> list[bytes]:
        """Return one fresh ciphertext for every number modulo n."""
        size = self._key.public.ciphertext_bytes
        return [
            int(ciphertext).to_bytes(size, "big") for ciphertext in in_threads(self._key.encrypt, weights)
        ]

    def begin(self) -> None:
        """Discard the sum of an earlier attempt."""
        self._blocks = []

    def add(self, blocks: Sequence[bytes]) -> None:
        """Add one silo's ciphertexts to the sum.

        Raises:
            ProtocolError: a wrong number of ciphertexts, or a ciphertext outside the group.
        """
        values = _ciphertexts(blocks, self._key.public)
        expected = math.ceil(self._plan.coordinates / self._layout.slots)
        if len(values) != expected:
            raise ProtocolError(f"sent {len(values)} ciphertexts instead of {expected}")
        square = self._key.public.square
        if self._blocks:
            values = [a * b % square for a, b in zip(self._blocks, values, strict=True)]
        self._blocks = values

    def open(self, own_masks: Sequence[bytes]) -> tuple[Float64[np.ndarray, " d"], int]:
        """Decrypt the weighted noisy sum in grid units, and the integer of the check coordinate.

        Args:
            own_masks: seeds of all silos' own masks.

        Raises:
            ProtocolError: a decrypted value that no honest sum can have.
        """
        n = self._key.public.n
        streams = [UniformIntegers(seed, int(n)) for seed in own_masks]
        totals: list[int] = []
        for masked in in_threads(self._key.decrypt, self._blocks):
            # Own masks off modulo n, then the representative between -n/2 and n/2: T_j may be negative.
            value = (masked - sum(stream.draw() for stream in streams)) % n
            totals += self._unpack(value if 2 * value < n else value - n)
        common, limit = self._plan.common, self._plan.largest_sum
        totals = totals[: self._plan.coordinates]
        if any(abs(total) > limit for total in totals):
            raise self._out_of_range()
        return np.array([total / common for total in totals[:-1]]), totals[-1]

    def _out_of_range(self) -> ProtocolError:
        return ProtocolError(
            "a decrypted coordinate is out of range: a user has more than "
            f"N_max = {self._plan.largest_count} records, or a silo broke its limits"
        )

    def _unpack(self, value: mpz) -> list[int]:
        # Half a slot is added to every slot, so that a negative value does not borrow from the next slot.
        bits = self._plan.slot_bits
        half = 1 << (bits - 1)
        shifted = int(value) + sum(half << (bits * slot) for slot in range(self._layout.slots))
        if not 0 <= shifted < 1 << (bits * self._layout.slots):
            raise self._out_of_range()
        return [((shifted >> (bits * slot)) & (2 * half - 1)) - half for slot in range(self._layout.slots)]


class PaillierEvaluator:
    """Silo's side: it computes its encrypted weighted sum without learning a weight.

    Args:
        plan: public numbers of the run.
        public: modulus n as the server sent it, big-endian.
        bits: agreed number of bits of the modulus; below 2048 only in tests.

    Raises:
        ProtocolError: a modulus of another size, an invalid modulus, or one that shares a factor with a possible
            count.
    """

    def __init__(self, plan: WeightingPlan, public: bytes, *, bits: int) -> None:
        if 8 * len(public) != bits or not public[0] >> 7:
            raise ProtocolError(f"the server's key is no number of {bits} bits, which were agreed on")
        try:
            self._key = PaillierPublicKey(mpz.from_bytes(public, "big"))
        except CryptoError as error:
            raise ProtocolError(f"the server's key was refused: {error}") from error
        # Attack: with a factor p <= N_max in n, the server would learn gcd(N_u, n) from r_u N_u modulo n.
        if gcd(self._key.n, plan.common) != 1:
            raise ProtocolError(
                f"the server's key was refused: it shares a factor with a number up to N_max = {plan.largest_count}, "
                "which blinded counts would show"
            )
        self._plan = plan
        self._layout = choose_layout(plan, self._key.bits)
        self._served = 1 if plan.renewed else plan.rounds
        self._blocks = math.ceil(plan.coordinates / self._layout.slots)
        self._rerandomizer = Rerandomizer(self._key, uses=plan.rounds * self._blocks)
        self._multipliers: list[mpz] = []
        self._powers: SimultaneousPowers | None = None

    @property
    def modulus(self) -> int:
        """Plaintext modulus n."""
        return int(self._key.n)

    def load(self, weights: Sequence[bytes], multipliers: Sequence[int]) -> None:
        """Load the encrypted weights of this silo's users; they serve until the next call.

        Args:
            weights: Enc(B_u) for each user.
            multipliers: r_u C modulo n for each user.

        Raises:
            ProtocolError: a ciphertext outside the group.
        """
        bases = _ciphertexts(weights, self._key)
        if self._layout.direct:
            self._multipliers = [mpz(multiplier) for multiplier in multipliers]
            bits = self._key.bits
        else:
            bases = in_threads(powmod, bases, multipliers, repeat(self._key.square, len(bases)))
            bits = exponent_bits(self._plan, self._layout.slots)
        products = self._served * self._blocks
        self._powers = SimultaneousPowers(
            bases, self._key.square, bits=bits, products=products, signed=not self._layout.direct
        )

    def encrypt_sum(
        self,
        contributions: Contributions,
        counts: Int64[np.ndarray, " m"],
        noise: Int64[np.ndarray, " c"],
        mask_keys: MaskKeys,
        own_mask: bytes,
        dither: bytes,
    ) -> list[bytes]:
        """Return the silo's re-randomised ciphertexts; see :meth:`private_weighting.Evaluator.encrypt_sum`."""
        assert self._powers is not None
        # prod_u Enc(C / N_u)^(n_{s,u} y_{s,u,j}); the last column is the check, with contributions of 1.
        counted = np.concatenate([contributions * counts[:, None], counts[:, None]], axis=1)
        shares = noise.tolist()
        n, square, slots = self._key.n, self._key.square, self._layout.slots
        common, bits = self._plan.common, self._plan.slot_bits
        pairwise = [(UniformIntegers(key, int(n)), adds) for key, adds in mask_keys]
        own = UniformIntegers(own_mask, int(n))
        dithers = self._dithers(dither)
        if slots == 1 and not self._layout.direct:
            products = self._powers.products(counted)
        else:
            products = (
                self._powers.product(self._exponents(counted[:, first : first + slots]))
                for first in range(0, counted.shape[1], slots)
            )
        blocks = []
        for block, product in enumerate(products):
            plaintext = own.draw()
            for stream, adds in pairwise:
                plaintext += stream.draw() if adds else -stream.draw()
            for slot, coordinate in enumerate(range(block * slots, min((block + 1) * slots, len(shares)))):
                plaintext += (shares[coordinate] * common + next(dithers)) << (slot * bits)
            # The fresh factor hides from the server, which decrypts, by which exponents the ciphertext was made.
            value = product * self._key.encode(plaintext) % square * self._rerandomizer.factor() % square
            blocks.append(int(value).to_bytes(self._key.ciphertext_bytes, "big"))
        return blocks

    def _exponents(self, columns: Int64[np.ndarray, "m k"]) -> list[int]:
        """Return the packed exponent of each user for one block: sum_k n_{s,u} y_{s,u,k} 2^(bits k)."""
        bits = self._plan.slot_bits
        packed = [sum(value << (bits * slot) for slot, value in enumerate(row)) for row in columns.tolist()]
        if not self._layout.direct:
            return packed
        n = self._key.n
        return [int(value * m % n) for value, m in zip(packed, self._multipliers, strict=True)]

    def _dithers(self, key: bytes) -> Iterator[int]:
        """Yield v_1 .. v_d, uniform on C values around 0, then 0 for the check, which must be a multiple of C."""
        stream, half = UniformIntegers(key, self._plan.common), self._plan.common // 2
        for _ in range(self._plan.length):
            yield int(stream.draw()) - half
        yield 0


def _ciphertexts(blocks: Sequence[bytes], key: PaillierPublicKey) -> list[mpz]:
    """Return the ciphertexts of received blocks; raise a ProtocolError if one is not in the group."""
    values = []
    for block in blocks:
        if len(block) != key.ciphertext_bytes:
            raise ProtocolError(f"sent a ciphertext of {len(block)} bytes instead of {key.ciphertext_bytes}")
        value = mpz.from_bytes(block, "big")
        try:
            key.check(value)
        except CryptoError as error:
            raise ProtocolError(f"sent a number that was refused: {error}") from error
        values.append(value)
    return values
