"""Answers that follow from what is asked alone, remembered for a session: parties in one process ask them again.

What was refused is asked anew each time.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from copy import deepcopy
from hashlib import blake2b
from typing import Any, Final

from gmpy2 import mpz
from torch import nn

from fedveil.crypto import paillier
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.crypto.rlwe import Ring
from fedveil.federation.membership import Charter, Membership
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method
from fedveil.privacy import ledger
from fedveil.privacy.accounting import PldAccountant
from fedveil.privacy.events import Event
from fedveil.randomness import ExperimentRandomness
from fedveil.run import populations, setup
from fedveil.run.config import task_choice
from fedveil.run.config.composition import Composition
from fedveil.run.config.experiment import Experiment
from fedveil.training.models import MODELS

_PRIMES: Final = 8
"""Primes of each size that keys are made of; two keys in a row share none."""
_SMALL: Final = 10_000
"""Parameters of a model that is worth remembering."""


def remember() -> None:
    """Let everything that is remembered be remembered from now on."""
    spare_the_disk()
    remember_signatures()
    remember_primes()
    remember_rings()
    remember_guarantees()
    remember_compositions()
    remember_noise()
    remember_documents()
    remember_models()
    remember_digits()


def spare_the_disk() -> None:
    """Leave it to the system when files reach the disk: tests ask whether they are sent there, and no power fails."""
    os.fsync = lambda descriptor: os.fstat(descriptor) and None


def remember_signatures() -> None:
    """Let each signature that was found valid be found so once: every party of a run verifies the same messages.

    A message is signed once by a key, and a key whose first signature was verified is believed to sign validly.
    """
    sign, verify = IdentityKey.sign, PublicIdentity.verify
    made, proved, valid = dict[Hashable, bytes](), set[bytes](), set[Hashable]()

    def signed(key: IdentityKey, message: bytes) -> bytes:
        raw, content = key.public.raw, blake2b(message).digest()
        if (raw, content) not in made:
            signature = made[raw, content] = sign(key, message)
            if raw not in proved:
                verify(key.public, message, signature)
                proved.add(raw)
            valid.add((raw, content, signature))
        return made[raw, content]

    def verified(identity: PublicIdentity, message: bytes, signature: bytes) -> None:
        asked = identity.raw, blake2b(message).digest(), bytes(signature)
        if asked not in valid:
            verify(identity, message, signature)
            valid.add(asked)

    IdentityKey.sign = signed  # type: ignore[method-assign]
    PublicIdentity.verify = verified  # type: ignore[method-assign]


def remember_primes() -> None:
    """Find a few primes of each size, and make the next keys of the same in turn."""
    find, found, given = paillier._prime, defaultdict[int, list[mpz]](list), Counter[int]()

    def prime(bits: int) -> mpz:
        turn = given[bits] % _PRIMES
        given[bits] += 1
        if turn == len(found[bits]):
            found[bits].append(find(bits))
        return found[bits][turn]

    paillier._prime = prime


def remember_rings() -> None:
    """Make each ring's context once: every ciphertext of a party has one of its own, and none is changed by its use."""
    Ring.context = _remembering(Ring.context)  # type: ignore[method-assign]


def remember_guarantees() -> None:
    """Derive the guarantee of a method and public facts once: each party of a run derives it by itself."""
    setup.derive = _remembering(setup.derive)


def remember_compositions() -> None:
    """Compose privacy loss distributions once: a run asks for the same epsilon at each of its rounds and at its end."""
    compose, known = PldAccountant._compose, dict[Hashable, Any]()

    def composed(accountant: PldAccountant, mu: float, others: Counter[Event]) -> Any:
        asked = compose, accountant, mu, tuple(others.items())
        if asked not in known:
            known[asked] = compose(accountant, mu, others)
        return known[asked]

    PldAccountant._compose = composed  # type: ignore[method-assign]


def remember_noise() -> None:
    """Calibrate a method's noise once: each party of a run finds it from the same document and public facts."""
    calibrate, known = Composition._calibrated, dict[Hashable, Method]()

    def calibrated(of: Composition, public: PublicFacts, epsilon: float) -> Method:
        counted = isinstance(of.experiment.method.get("group_size"), str)
        users = of.population.records_per_user().tobytes() if counted else b""
        asked = repr((of.experiment, of.side_releases, of.clip, of._facts(), public, epsilon)), users
        if " at 0x" in asked[0]:  # an object that is named by its address alone, which another one may get
            return calibrate(of, public, epsilon)
        if asked not in known:
            known[asked] = calibrate(of, public, epsilon)
        return known[asked]

    Composition._calibrated = calibrated  # type: ignore[method-assign]


def remember_documents() -> None:
    """Write each document once, and read each line of a ledger once: a silo that comes back reads its own again."""
    Membership.to_toml = _remembering(Membership.to_toml)  # type: ignore[method-assign]
    Charter.to_toml = _remembering(Charter.to_toml)  # type: ignore[method-assign]
    write, known = Experiment.to_toml, dict[str, str]()  # by all its fields: an experiment has no hash

    def written(experiment: Experiment) -> str:
        asked = repr(experiment)
        if asked not in known:
            known[asked] = write(experiment)
        return known[asked]

    Experiment.to_toml = written  # type: ignore[method-assign]
    ledger._read_line = _remembering(ledger._read_line)


def remember_models() -> None:
    """Build and try each small built-in model once, and give copies: every party of a run builds the same."""
    build, known = task_choice.build_model, dict[Hashable, nn.Module]()

    def built(name: str, **of: Any) -> nn.Module:
        asked = name, *(one.seed if isinstance(one, ExperimentRandomness) else one for one in of.values())
        if asked in known:
            return deepcopy(known[asked])
        model = build(name, **of)
        if name in MODELS and sum(one.numel() for one in model.parameters()) <= _SMALL:
            known[asked] = deepcopy(model)
        return model

    task_choice.build_model = built


def remember_digits() -> None:
    """Read digits once for each division among users: most runs of tests are on them."""
    load = populations.load_population
    remembered = _remembering(load)
    populations.load_population = lambda data, seed: (remembered if data.name == "digits" else load)(
        data, seed
    )


def _remembering(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of frozen values, which may be equal where they are printed in two ways."""
    known: dict[Hashable, Any] = {}

    def remembered(*asked: Any) -> Any:
        case = *asked, *map(repr, asked)
        if case not in known:
            known[case] = answer(*asked)
        return known[case]

    return remembered
