"""Server's end of secure aggregation with recovery: relays messages, adds vectors, removes masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.key_agreement import AgreementKey, RoundId, derive
from fedveil.crypto.masks import apply_masks_
from fedveil.crypto.shamir import Share, combine, consistent, odd_one_out
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.masking.recoverable_aggregation import (
    SEED_PURPOSE,
    AgreedSurvivors,
    Phase,
    RecoveryDirectory,
    RecoveryKeys,
    RelayedShares,
    RevealedShares,
    ShareBundle,
    SignedSurvivors,
    Survivors,
    check_threshold,
)
from fedveil.protocols.masking.secure_aggregation import MASK_PURPOSE, AggregationPlan
from fedveil.protocols.messages import SERVER, Envelope, MaskedVector, Message, RoundStart
from fedveil.protocols.pairwise_keys import check_cohort
from fedveil.protocols.parties import Party
from fedveil.protocols.protocol import Drawn, Outgoing


class RecoverableServer(Party):
    """Server's end of a session; the caller ends the wait for silos by :meth:`proceed`.

    Args:
        plan: public specification of the sum.
        run: 16 bytes that name the session.
        threshold: fewest silos that must survive.
    """

    ready = True  # every attempt has keys of its own

    def __init__(self, plan: AggregationPlan, run: bytes, *, threshold: int) -> None:
        check_threshold(threshold, plan.clients)
        super().__init__(run, SERVER)
        self._plan, self._threshold = plan, threshold
        self._phase = Phase.IDLE
        self._cohort: tuple[int, ...] = ()
        self._asked: tuple[int, ...] = ()
        self._arrived: dict[int, Message] = {}
        self._keys: dict[int, bytes] = {}
        self._shown: dict[int, bytes] = {}
        self._sharers: tuple[int, ...] = ()
        self._sum = np.zeros(0, dtype=plan.word)

    @property
    def missing(self) -> tuple[int, ...]:
        """Silos whose message for the current step has not arrived."""
        if self._phase is Phase.DONE:
            return ()
        return tuple(silo for silo in self._asked if silo not in self._arrived)

    @property
    def has_quorum(self) -> bool:
        """Whether at least ``threshold`` silos have answered, so that :meth:`proceed` can continue."""
        return len(self._arrived) >= self._threshold

    @property
    def n_summed(self) -> int:
        """Number of silos whose vectors are in the sum; final once :attr:`may_have_released` is True."""
        return len(self._cohort)

    @property
    def may_have_released(self) -> bool:
        """Whether the server has requested shares of this attempt; from then on its privacy event is charged."""
        return self._phase in (Phase.REVEAL, Phase.DONE)

    def begin(self, round_id: RoundId, cohort: tuple[int, ...], drawn: Drawn | None = None) -> Outgoing:
        """Begin a round, or another attempt at it; return the messages to the cohort.

        Args:
            round_id: a later round or attempt than any before.
            cohort: numbers of the silos that begin the attempt, ascending.
            drawn: ignored, because the silos' vectors are over the sampled users already.

        Raises:
            ProtocolError: an attempt that was played before, or fewer silos than the threshold.
        """
        check_cohort(cohort, self._plan.clients)
        self._check_enough(len(cohort))
        if round_id.run != self._round_id.run:
            raise ProtocolError("a round of another run cannot be played")
        self._inbox.open(round_id)
        # Keys and signatures are bound to the cohort that begins, not to the survivors, which are not known yet.
        self._round_id, self._phase = self._bound(round_id, cohort), Phase.KEYS
        self._cohort, self._asked, self._arrived, self._keys = cohort, cohort, {}, {}
        self._sum = np.zeros(self._plan.length, dtype=self._plan.word)
        return self._to_each(self._cohort, RoundStart(cohort=cohort))

    def receive(self, sender: int, data: bytes) -> list[tuple[int, bytes]]:
        """Read a silo's message; return the messages of the next step once the step is complete.

        Raises:
            ProtocolError: a message that must not be accepted; the error names the silo.
        """
        try:
            envelope = Envelope.decode(data)
            awaited: dict[Phase, type[Message]] = {
                Phase.KEYS: RecoveryKeys,
                Phase.SHARES: ShareBundle,
                Phase.VECTORS: MaskedVector,
                Phase.SIGN: SignedSurvivors,
                Phase.REVEAL: RevealedShares,
            }
            if envelope.sender != sender or sender not in self._asked or self._phase not in awaited:
                raise ProtocolError("sent a message as somebody else, too late, or when none was awaited")
            self._inbox.accept(envelope, awaited[self._phase])
            self._check(envelope.message)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        self._arrived[sender] = envelope.message
        return [] if self.missing else self.proceed()

    def proceed(self) -> list[tuple[int, bytes]]:
        """Proceed with the silos that have answered; the other silos count as vanished.

        Raises:
            ProtocolError: fewer than the threshold answered; the attempt is over and nothing was revealed.
        """
        self._check_enough(len(self._arrived))
        answers, self._arrived = self._arrived, {}
        self._asked = tuple(sorted(answers))
        # From SIGN on the sum is fixed: a silo that vanishes later stays in it, and the others' shares open its mask.
        if self._phase not in (Phase.SIGN, Phase.REVEAL):
            self._cohort = self._asked
        if self._phase is Phase.KEYS:
            self._phase = Phase.SHARES
            keys = [(silo, m) for silo, m in sorted(answers.items()) if isinstance(m, RecoveryKeys)]
            self._keys = {silo: pair.mask.public for silo, pair in keys}
            return self._to_each(self._cohort, RecoveryDirectory(keys=tuple(keys)))
        if self._phase is Phase.SHARES:
            self._phase, self._sharers = Phase.VECTORS, self._cohort
            bundles = {silo: m for silo, m in answers.items() if isinstance(m, ShareBundle)}
            self._shown = {silo: bundle.shown for silo, bundle in bundles.items()}
            return self._relay({silo: dict(bundle.shares) for silo, bundle in bundles.items()})
        if self._phase is Phase.VECTORS:
            self._phase = Phase.SIGN
            for content in answers.values():
                if isinstance(content, MaskedVector):
                    self._sum += content.words
            return self._to_each(self._cohort, Survivors(silos=self._cohort))
        if self._phase is Phase.SIGN:
            self._phase = Phase.REVEAL
            signed = [(s, m.signature) for s, m in sorted(answers.items()) if isinstance(m, SignedSurvivors)]
            return self._to_each(self._asked, AgreedSurvivors(signatures=tuple(signed)))
        self._phase = Phase.DONE
        self._unmask({s: dict(m.shares) for s, m in answers.items() if isinstance(m, RevealedShares)})
        return []

    def result(self) -> Int64[np.ndarray, " d"]:
        """Return the sum of the survivors' vectors in grid units.

        Raises:
            ProtocolError: the attempt is not complete, or the sum is out of range.
        """
        if self._phase is not Phase.DONE:
            raise ProtocolError(f"the sum is not complete; silos {list(self.missing)} are missing")
        return self._plan.decode(self._sum)

    def _check_enough(self, silos: int) -> None:
        if silos < self._threshold:
            raise ProtocolError(
                f"{silos} silos are left and {self._threshold} are needed; the attempt is over"
            )

    def _check(self, content: Message) -> None:
        if isinstance(content, MaskedVector):
            self._plan.check(content)
        # Checked at arrival, where the error still names the silo: `_unmask` needs a share for every silo that
        # shared.
        if isinstance(content, RevealedShares) and tuple(s for s, _ in content.shares) != self._sharers:
            raise ProtocolError("did not give one share for every silo")

    def _relay(self, bundles: dict[int, dict[int, bytes]]) -> list[tuple[int, bytes]]:
        messages: list[tuple[int, bytes]] = []
        for recipient in self._cohort:
            shares = []
            for sender in self._cohort:
                if sender != recipient:
                    if recipient not in bundles[sender]:
                        raise ProtocolError(f"sealed no shares for silo {recipient}", silo=sender)
                    shares.append((sender, bundles[sender][recipient]))
            messages += self._to_each([recipient], RelayedShares(shares=tuple(shares)))
        return messages

    def _unmask(self, revealed: dict[int, dict[int, bytes]]) -> None:
        """Remove the survivors' own masks, and their pairwise masks with the silos that vanished.

        The server adds sum_{s in L} x_s + b_s + sum_{t vanished} +-m_{s,t}; the pairwise masks within L cancel.
        """
        masks: list[tuple[bytes, bool]] = []
        for silo in self._sharers:
            shares = [Share(point=holder + 1, value=given[silo]) for holder, given in revealed.items()]
            if silo in self._cohort:
                masks.append((self._secret(silo, "own mask", shares, self._seed_of), False))
                continue
            vanished = AgreementKey.from_bytes(self._secret(silo, "mask key", shares, self._key_of))
            for survivor in self._cohort:
                key = vanished.agree(self._keys[survivor]).derive(MASK_PURPOSE, self._round_id)
                # The lower number of a pair adds the mask: a survivor above the vanished silo has subtracted it.
                masks.append((key, survivor > silo))
        apply_masks_(self._sum, masks)

    def _seed_of(self, silo: int, secret: bytes) -> bool:
        """Return whether ``secret`` is the seed that a silo has shared."""
        return derive(secret, SEED_PURPOSE, self._round_id) == self._shown[silo]

    def _key_of(self, silo: int, secret: bytes) -> bool:
        """Return whether ``secret`` is the private half of the mask key that a silo has signed."""
        return AgreementKey.from_bytes(secret).public == self._keys[silo]

    def _secret(self, silo: int, what: str, shares: list[Share], its: Callable[[int, bytes], bool]) -> bytes:
        """Rebuild a silo's secret from shares and check it against the silo's announcement.

        Raises:
            ProtocolError: the shares do not give the announced secret. If the other shares identify the wrong one,
                the error names the silo that sent or dealt it.
        """

        def fit(some: list[Share]) -> bool:
            if len(some) < self._threshold or not consistent(some, threshold=self._threshold):
                return False
            try:
                return its(silo, combine(some, threshold=self._threshold))
            except CryptoError:
                return False

        # Verified before use: a wrong secret would leave a uniform sum, which `decode` does not always refuse.
        if not fit(shares):
            raise self._wrong(silo, what, shares, fit)
        return combine(shares, threshold=self._threshold)

    def _wrong(
        self, silo: int, what: str, shares: list[Share], fit: Callable[[list[Share]], bool]
    ) -> ProtocolError:
        """Return the error that names the silos that can have caused a wrong share.

        It names them as far as the other shares show. Let n silos have sent shares, with threshold t. The error is
        right unless n - t + 1 of them collude. With fewer colluding silos, either t honest shares, or t - 1 honest
        shares and the announced secret, determine the polynomial that was dealt.
        """
        odd = odd_one_out(shares, fit)
        if odd is not None and odd.point - 1 == silo:
            return ProtocolError(f"gave a wrong share of its {what}", silo=silo)
        if odd is not None:  # shares travel sealed, so no third party knows which share the dealer sent
            return ProtocolError(
                f"silo {odd.point - 1} gave a wrong share of silo {silo}'s {what}, or was dealt it by silo {silo}"
            )
        if len(shares) > self._threshold and consistent(shares, threshold=self._threshold):
            return ProtocolError(f"dealt shares of another {what} than its own", silo=silo)
        holders, threshold = [one.point - 1 for one in shares], self._threshold
        return ProtocolError(
            f"the shares of silo {silo}'s {what} do not give the one that it announced: silo {silo} dealt wrong ones, "
            f"or one of the silos {holders} gave a wrong one; {len(shares)} shares at a threshold of {threshold} do "
            "not show who"
        )
