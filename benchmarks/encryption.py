"""Partial encryption of a deep model's update: encryption, sums, decryption, votes, and bytes.

The peer is TenSEAL's CKKSVector with a public key, poly degree 2^15, moduli [60, 40, 40, 60] and scale 2^40, as the
authors' program encrypts. Both run in one thread. What SEAL needs by itself, encryptions of zero written to memory, is
the floor of ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
import tenseal
from tenseal import sealapi

from benchmarks.harness import Row, at_most, cpu_seconds
from fedveil.crypto.ckks import CkksKey, CkksParameters, CkksSum
from fedveil.crypto.seal_format import MemoryFile
from fedveil.protocols.driver import LocalDriver
from fedveil.protocols.partial_encryption.plan import decode_bitmap, encode_bitmap, largest, secret_order
from fedveil.randomness import ExperimentRandomness, PrivacyRandomness
from fedveil.run.config.study import Selection, load_study
from fedveil.run.populations import PopulationCache
from fedveil.run.rounds.round_context import RoundContext
from fedveil.run.setup import prepare
from fedveil.run.simulation import SimulatedParties, play_round

RESNET_18 = 11_181_642
_SILOS = 10
_GRID = 2.0**-30


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU seconds and bytes of a client, error of the mean over all; floor and read: SEAL in encrypt and in add."""

    encrypt: float
    floor: float
    add: float
    read: float
    decrypt: float
    up: int
    down: int
    error: float

    @property
    def client(self) -> float:
        """CPU seconds of a client."""
        return self.encrypt + self.decrypt


def rows(quick: bool) -> Iterator[Row]:
    """Encrypt ResNet-18 (quick: a tenth of it, scaled) among 10 clients, all and a tenth; then 1 M beside the peer."""
    yield from _encrypted(RESNET_18 // 10, 1) if quick else _encrypted(RESNET_18, 3)
    yield from _against_peer(100_000 if quick else 1_000_000)
    if not quick:
        yield from _overhead()


def smallest() -> Iterator[Row]:
    """Encrypt few parameters once, and beside the peer."""
    yield from _encrypted(20_000, 1)
    yield from _against_peer(1_000)


def _encrypted(length: int, repeats: int) -> Iterator[Row]:
    """Encrypt so many parameters, and scale to those of ResNet-18."""
    scale = RESNET_18 / length
    for share, name in ((1.0, "all of it"), (0.1, "r = 10 %")):
        encrypted = int(share * length)
        ours = _ours(encrypted, repeats)
        case = f"11.2 M parameters, {_SILOS} clients, {name}"
        yield at_most(f"{case}: encode, encrypt, serialise", "CPU s", scale * ours.encrypt, 2.5 * share)
        yield Row(
            case=f"{case}: of it SEAL's encryptions of zero, serialised",
            unit="CPU s",
            ours=scale * ours.floor,
        )
        yield Row(
            case=f"{case}: encode, encrypt, serialise over SEAL", unit="times", ours=ours.encrypt / ours.floor
        )
        yield at_most(f"{case}: decrypt", "CPU s", scale * ours.decrypt, 1.0 * share)
        yield Row(case=f"{case}: add {_SILOS} up, the server", unit="CPU s", ours=scale * ours.add)
        yield Row(
            case=f"{case}: of it SEAL's reading, which expands seeds", unit="CPU s", ours=scale * ours.read
        )
        yield at_most(f"{case}: up", "bytes per parameter encrypted", ours.up / encrypted, 8.0)
        yield at_most(f"{case}: down", "bytes per parameter encrypted", ours.down / encrypted, 16.0)
        yield at_most(f"{case}: error of the mean", "largest", ours.error, 1e-7)
    yield at_most(
        "11.2 M parameters, r = 10 %: a ballot, coded and read", "CPU s", scale * _vote(length, repeats), 1.0
    )


def _overhead() -> Iterator[Row]:
    """Play rounds of Table 1's preset in turn, with and without encryption; needs the subset of Imagenette."""
    populations, seats = PopulationCache(), {}
    for name in ("fedavg", "ckks-fedavg", "static-10"):
        selection = Selection(scenarios=("iid",), variants=(name,))
        (experiment,) = load_study("table-1-imagenette", selection).experiments
        prepared = prepare(experiment, populations)
        initial = prepared.task.initial()
        parties = SimulatedParties(driver=LocalDriver(prepared.protocol_spec), initial=initial)
        seats[name] = (prepared.setting, initial, parties, count(1))

    def play(name: str) -> None:
        setting, initial, parties, numbers = seats[name]
        turn = RoundContext(
            setting=setting,
            model=initial,
            round_number=next(numbers),
            experiment=ExperimentRandomness(0),
            privacy=PrivacyRandomness.system(),
        )
        play_round(turn, parties)

    plain, *hidden = cpu_seconds(*(partial(play, name) for name in seats), repeats=3)
    for name, seconds, target in zip(("CKKS-FedAvg", "static 10 %"), hidden, (1.5, 1.15), strict=True):
        yield at_most(f"a round of {name} over one of FedAvg, small ResNet", "times", seconds / plain, target)


def _against_peer(length: int) -> Iterator[Row]:
    ours, peer = _ours(length, 1), _tenseal(length)
    scale = 1_000_000 / length
    cpu, sent = peer.client / ours.client, peer.up / ours.up
    case = f"1 M parameters{'' if scale == 1 else f' (from {length:,})'}, a client"
    yield Row(
        case=f"{case}: encrypt, serialise, decrypt; peer: CKKSVector, public key",
        unit="CPU s",
        ours=scale * ours.client,
        peer=scale * peer.client,
        ratio=cpu,
        target=20.0,
        met=cpu >= 20,
    )
    yield Row(
        case=f"{case}: SEAL's encryptions alone; peer: as before",
        unit="CPU s",
        ours=scale * ours.floor,
        peer=scale * peer.client,
        ratio=peer.client / ours.floor,
    )
    yield Row(
        case=f"{case}: bytes up; peer: CKKSVector, public key",
        unit="bytes per parameter",
        ours=ours.up / length,
        peer=peer.up / length,
        ratio=sent,
        target=8.0,
        met=sent >= 8,
    )


def _ours(length: int, repeats: int) -> Cost:
    """Encrypt, add up and decrypt updates as partial encryption does: whole numbers of a grid."""
    parameters = CkksParameters(silos=_SILOS)
    key = CkksKey(parameters)
    update = np.random.default_rng(0).normal(0, 1e-2, length)

    def encrypt() -> bytes:
        return key.encrypt(np.rint(update / _GRID).astype(np.int64))

    data = encrypt()

    def add() -> bytes:
        total = CkksSum(parameters, length)
        for _ in range(_SILOS):
            total.add(data)
        return total.encode()

    summed = add()
    mean = key.decrypt(summed, length) * (_GRID / _SILOS)
    encrypting, floor, adding, reading, decrypting = cpu_seconds(
        encrypt,
        partial(_seal_alone, parameters, parameters.blocks(length)),
        add,
        partial(_seal_reads, parameters, _SILOS * parameters.blocks(length)),
        lambda: key.decrypt(summed, length) * (_GRID / _SILOS),
        repeats=repeats,
    )
    return Cost(
        encrypt=encrypting,
        floor=floor,
        add=adding,
        read=reading,
        decrypt=decrypting,
        up=len(data),
        down=len(summed),
        error=float(np.abs(mean - update).max()),
    )


def _seal_alone(parameters: CkksParameters, ciphertexts: int) -> None:
    """Make and serialise as many seeded encryptions of zero with SEAL's calls alone: what no encoding can avoid."""
    key = sealapi.KeyGenerator(parameters.context).secret_key()
    encryptor, file = sealapi.Encryptor(parameters.context, key), MemoryFile()
    for _ in range(ciphertexts):
        file.save(encryptor.encrypt_zero_symmetric())


def _seal_reads(parameters: CkksParameters, ciphertexts: int) -> None:
    """Read as many seeded encryptions of zero with SEAL's calls alone: its expansion of the seeds is the most of it."""
    key = sealapi.KeyGenerator(parameters.context).secret_key()
    file = MemoryFile()
    data = file.save(sealapi.Encryptor(parameters.context, key).encrypt_zero_symmetric())
    for _ in range(ciphertexts):
        file.load(sealapi.Ciphertext(), parameters.context, data)


def _vote(length: int, repeats: int) -> float:
    """Return what a silo spends on its ballot and on the partition that comes back."""
    update, count = np.random.default_rng(0).normal(size=length), length // 10

    def vote() -> np.ndarray:
        order = secret_order(os.urandom(32), length)
        chosen = largest(np.abs(update)[order], count)
        back = decode_bitmap(encode_bitmap(chosen), length, count)
        partition = np.zeros(length, dtype=np.bool_)
        partition[order[back]] = True
        return partition

    (seconds,) = cpu_seconds(vote, repeats=repeats)
    return seconds


def _tenseal(length: int) -> Cost:
    """Do the same with plain TenSEAL; the context is made before and not counted."""
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS, poly_modulus_degree=2**15, coeff_mod_bit_sizes=[60, 40, 40, 60], n_threads=1
    )
    context.global_scale = 2**40
    update = np.random.default_rng(0).normal(0, 1e-2, length)
    slots = 2**14
    chunks = [update[first : first + slots].tolist() for first in range(0, length, slots)]

    def encrypt() -> list[bytes]:
        return [tenseal.ckks_vector(context, chunk).serialize() for chunk in chunks]

    data = encrypt()

    def decrypt() -> np.ndarray:
        return np.concatenate([tenseal.ckks_vector_from(context, one).decrypt() for one in data])

    error = float(np.abs(decrypt() - update).max())
    encrypting, decrypting = cpu_seconds(encrypt, decrypt, repeats=1)
    sent = sum(len(one) for one in data)
    return Cost(
        encrypt=encrypting,
        floor=encrypting,
        add=0.0,
        read=0.0,
        decrypt=decrypting,
        up=sent,
        down=sent,
        error=error,
    )
