"""Send every client's update as a message of its own: with noise, compressed, or both at once (CEPAM).

A message holds a client's bounded update plus noise, in one of four forms:

==========  =====================================================================================================
form        decoded by the server
==========  =====================================================================================================
Numbers     update + noise, at 4 bytes a parameter
Dithered    update + noise + the error of a subtractively dithered quantiser (SDQ), uniform on its step
Rounded     update + noise, rounded to a grid of at most half the noise's standard deviation; no dither, no key
Layered     update + noise, the noise being the error of a layered quantiser (LRSUQ, docs/theory/lrsuq.md)
==========  =====================================================================================================

The set of clients is public and fixed. A client without records sends a message too: noise around zero. So a client's
records may come or go, and the noise of the sum keeps its size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Float64

from fedveil.config_keys import NonNegative, is_number, make_plain
from fedveil.errors import ChannelError, CompositionError
from fedveil.methods.channels import Channel, refuses_decay
from fedveil.methods.message_encoding import (
    KEY_REASON,
    OF_DITHERS,
    OF_LAYERS,
    CodedMessage,
    EncodedMessage,
    MessageCost,
    Sender,
    encode_layered,
    encode_quantized,
    layered_codec,
)
from fedveil.privacy.claims import Claim, Reveals, covered_knowledge, no_guarantee
from fedveil.privacy.events import Event, GaussianEvent, LaplaceEvent, NoGuarantee
from fedveil.privacy.noise import (
    DiscreteGaussian,
    DiscreteLaplace,
    finest_grid,
    grid_for,
    grid_law,
    is_finest,
)
from fedveil.privacy.published_bounds import OneRoundProfile, gaussian_profile, laplace_profile
from fedveil.privacy.rounding import LEAST_STEPS, round_to_grid, rounding_loss
from fedveil.privacy.statement import show_at_least, show_at_most
from fedveil.quantization.codec import Codec, decode_integers, encode_integers
from fedveil.quantization.lattices import Z1
from fedveil.quantization.laws import CellLaw, GaussianLaw, LaplaceLaw
from fedveil.quantization.quantizers import LayeredQuantizer
from fedveil.quantization.streams import KeyedStreams
from fedveil.stage import Published, Sensitivity, everyone_adds

NoiseName: TypeAlias = Literal["gaussian", "laplace"]
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Numbers:
    """Form that sends the update as numbers."""

    carries: ClassVar[str] = "drawn exactly, on a grid"


@dataclass(frozen=True, kw_only=True)
class Dithered:
    """Form that quantises the update, noise included, on step · Z with subtractive dither.

    Attributes:
        step: in units of the noise's scale; without noise, in units of s.
    """

    carries: ClassVar[str] = "drawn exactly, on a grid, and added before the message is quantised (SDQ)"

    step: float

    def __post_init__(self) -> None:
        make_plain(self)
        if not (is_number(self.step) and self.step > 0 and math.isfinite(self.step)):
            raise CompositionError(f"step = {self.step}: a quantiser needs a finite step above 0")


@dataclass(frozen=True, kw_only=True)
class Layered:
    """Form whose noise is the compression error of a layered quantiser.

    Attributes:
        lattice: lattice of the quantiser; None sends Gaussian noise block by block in the cheapest way.
    """

    carries: ClassVar[str] = "the compression error of the message (LRSUQ)"

    lattice: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rounded:
    """Form that rounds the update, its Gaussian noise included, to a grid (docs/theory/round-after-noise.md).

    Attributes:
        step: largest step of the grid, in units of the noise's standard deviation; at most 1/2.
    """

    carries: ClassVar[str] = (
        "drawn exactly, on a grid, and added before the message is rounded to a coarser grid"
    )

    step: float

    def __post_init__(self) -> None:
        make_plain(self)
        if not (is_number(self.step) and 1e-6 <= self.step <= 1 / LEAST_STEPS):
            raise CompositionError(
                f"step = {self.step}: rounding after the noise needs a step from 1e-6 to {1 / LEAST_STEPS:g} standard "
                "deviations of one message's noise"
            )


NORM_REASON: Final = (
    "updates are not bounded, and the noise is scaled by the norm of the private update, which is sent unencrypted "
    "(method.scale = 'norm', as published)"
)

Form: TypeAlias = Numbers | Dithered | Rounded | Layered


@dataclass(frozen=True, kw_only=True)
class ClientMessages(Channel):
    """Channel of clients that send one message each.

    X is the client's bounded update, and s = ``bound`` (||X||_2 if the bound is None). The noise of a message has the
    scale noise_multiplier · s: the standard deviation of a Gaussian, or the b of a Laplace law. In CEPAM's symbols
    noise_multiplier is sigma / gamma or b / gamma: X gamma / s is quantised, and the decoded value is multiplied by s
    / gamma.

    Attributes:
        senders: number of clients that send in a round, a public number.
        noise: law of the noise; None for none.
        noise_multiplier: scale of the noise, in units of s; 0 without noise.
        bound: s, in the unit of the update: the bound C of an update, l2 for Gaussian and l1 for Laplace noise. None
            takes each update's own norm, as CEPAM does. Then the noise depends on private data, and no guarantee
            follows.
        form: encoding of an update.
    """

    senders: int
    noise: NoiseName | None
    noise_multiplier: NonNegative
    bound: float | None
    form: Form

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.form) not in get_args(Form):
            supported = ", ".join(kind.__name__ for kind in get_args(Form))
            raise CompositionError(
                f"form = {type(self.form).__name__}: updates are coded as {supported} say, by their fields"
            )
        if self.noise is None and self.noise_multiplier:
            raise CompositionError(f"noise_multiplier = {self.noise_multiplier} without a law of noise")
        measured = self.noise == "gaussian" and self.noise_multiplier > 0 and self.bound is not None
        if isinstance(self.form, Rounded) and not measured:
            raise CompositionError(
                "messages are rounded after Gaussian noise that is measured in a public bound alone; give a "
                "noise_multiplier above 0 and a clip, or remove the step"
            )
        if isinstance(self.form, Layered):
            if self.noise is None or self.noise_multiplier == 0:
                raise CompositionError(
                    "the quantiser's error is the noise: noise_multiplier = 0 leaves it nothing to compress with; "
                    "give a noise_multiplier above 0, or send the updates as numbers"
                )
            # Building the codec refuses an unknown lattice now rather than in the first round.
            self._codec(1.0, self.form)

    def refuses(self, method: Any) -> Iterable[str]:
        """Refuse senders other than a fixed number of clients, and noise measured in another bound."""
        yield from refuses_decay(self, method)
        if method.contribution.per != "client":
            yield "only clients send messages of their own (ClientContribution); silos send sums"
        if not method.sampler.fixed_size:
            yield (
                "clients who send messages share one noise, so their number must be fixed, but Poisson sampling draws "
                "a random one; sample uniformly without replacement"
            )
        if method.sampler.size not in (None, self.senders):
            yield f"{method.sampler.size} clients are drawn, but the noise is that of {self.senders}"
        order, kind = (1, "ClipL1") if self.noise == "laplace" else (2, "Clip")
        bound = method.bound
        measured = (bound.order, bound.norm) == (order, self.bound) if bound.bounded else self.bound is None
        if not measured:
            yield (
                f"the messages' noise is measured in {self.bound or 'the norm of each update'}, the bound is {bound}: "
                f"{self.noise or 'no'} noise needs {kind} with that norm, or Unbounded where updates are measured in "
                "their own norm"
            )

    @property
    def supports_noise_decay(self) -> bool:
        # The step is 4 to 7 times a power of two, so that its ratio to decaying noise would move by up to a quarter.
        return self.noise == "gaussian" and not isinstance(self.form, Rounded)

    def scaled_noise(self, factor: float) -> ClientMessages:
        return replace(self, noise_multiplier=self.noise_multiplier * factor)

    def check_fine(self, n_silos: int, grid: float) -> None:
        """Check that the grid of a message's noise is the finest."""
        law = (
            self.additive(self.bound, grid)
            if self.supports_noise_decay and self.noisy and self.bound
            else None
        )
        if isinstance(law, DiscreteGaussian) and not is_finest(law, grid):
            raise CompositionError(
                f"noise_decay: messages' noise of multiplier {self.noise_multiplier:g} in the last round is too small "
                f"beside an exact sum over {self.senders} clients; let it fall less, or take more noise"
            )

    @property
    def content(self) -> Reveals:
        """Information that a message reveals; a layered quantiser's key reveals more than its value."""
        if not self.noisy:
            return Reveals.EXACT
        return Reveals.KEYED if isinstance(self.form, Layered) else Reveals.MESSAGE

    @property
    def sends_bytes(self) -> bool:
        return not isinstance(self.form, Numbers)

    def message_std(self, n: int) -> float:
        """Return the standard deviation of one message's Gaussian noise; 0 for other noise or none."""
        return self.noise_multiplier * (self.bound or 0.0) if self.noise == "gaussian" else 0.0

    def claims(self, sensitivity: Sensitivity) -> tuple[Claim, ...]:
        """Claim all messages' noise for their sum, one message's for itself, and the others' against a client.

        Neighbouring data differs in the records of one client. The client sends a message in both cases, so exactly
        one message changes, by at most C. Each of K messages carries N(0, (z C)^2 I), so their sum carries N(0, K (z
        C)^2 I): multiplier sqrt(K) z. Of Laplace noise only the client's own counts, because a sum of Laplace
        variables is not a Laplace variable: multiplier z in l1. docs/theory/cepam.md has the argument.
        """
        if not self.noisy:
            return (no_guarantee("clients send their updates without noise"),)
        if self.bound is None:
            return (no_guarantee(NORM_REASON),)
        last = (
            no_guarantee(KEY_REASON, unless=Reveals.COUNTS)
            if isinstance(self.form, Layered)
            else self._singly()
        )
        return (
            Claim(covered_knowledge(Reveals.SUM), self._against(self.senders)),
            Claim(covered_knowledge(Reveals.SUM, Reveals.OWN), self._against(self.senders - 1)),
            last,
        )

    def _singly(self) -> Claim:
        """Return the claim for readers of single messages, also for the server together with one client.

        A message contains its noise before it is quantised, so the length of the quantised message is
        post-processing.
        """
        # With a single client, a coalition that contains it knows all noise.
        own = (Reveals.OWN,) if self.senders > 1 else ()
        return Claim(covered_knowledge(Reveals.SUM, Reveals.MESSAGE, Reveals.LENGTH, *own), self._against(1))

    def _against(self, unknown: int) -> Event:
        """Return the event of the mean for a party that knows all noise except that of ``unknown`` clients."""
        if unknown < 1:
            return NoGuarantee(reason="no share of the noise is left")
        if self.noise == "laplace":
            return LaplaceEvent(noise_multiplier=self.noise_multiplier)
        return GaussianEvent(noise_multiplier=self.noise_multiplier * math.sqrt(unknown))

    def grid_loss(self, sensitivity: Sensitivity) -> float:
        """Return the epsilon of a round, per coordinate, because the noise lies on a grid."""
        if isinstance(self.form, Layered) or self.bound is None or not self.noisy:
            return 0.0
        law = self.additive(self.bound, sensitivity.bound.grid)
        if isinstance(law, DiscreteGaussian):
            # The sum carries one grid error per message; only one message's Laplace noise is claimed.
            fine = 2 * self.senders * law.log_ratio_to_gaussian
            coarse = self._rounding_step(self.form) if isinstance(self.form, Rounded) else 0.0
            return fine + (rounding_loss(law.std / coarse, self.senders) if coarse else 0.0)
        return 2 * law.log_ratio_to_laplace

    def mechanisms(self, sensitivity: Sensitivity) -> tuple[str, ...]:
        if not self.noisy or self.bound is None:
            return ()
        if sensitivity.divided:  # each part has its own bound and noise, which the protection tells
            return (f"each of {self.senders} clients sends a message, also one without records",)
        order, law = (
            ("l1", "Laplace noise of scale")
            if self.noise == "laplace"
            else ("l2", "Gaussian noise of standard deviation")
        )
        return (
            f"each of {self.senders} clients sends its update, clipped to {order} norm {show_at_most(self.bound)}, "
            f"with {law} {show_at_least(self.noise_multiplier * self.bound)} in each coordinate: {self.form.carries}",
            "a client without records sends noise alone",
        )

    def uncovered_facts(self, method: Any) -> tuple[str, ...]:
        """Return the quantisers' numerical assumptions and the trust in the clients, which no epsilon covers."""
        if not self.noisy or self.bound is None:
            return ()
        dithers = OF_DITHERS if isinstance(self.form, Dithered) and self.noise == "gaussian" else ()
        return (*(OF_LAYERS if isinstance(self.form, Layered) else dithers), everyone_adds("client", 0))

    def published_figures(self, method: Any, public: Any) -> tuple[Published, ...]:
        """Return the one-round profile of CEPAM, if the noise is scaled as in the paper."""
        if not self.noisy or self.bound is not None:
            return ()
        return one_round(
            noise=self.noise or "gaussian",
            noise_multiplier=self.noise_multiplier,
            clients=self.senders,
            local=method.local,
            records=public.silo_records,
        )

    @property
    def noisy(self) -> bool:
        """Return whether messages carry privacy noise."""
        return self.noise is not None and self.noise_multiplier > 0

    @property
    def is_additive(self) -> bool:
        """Return whether messages are numbers with known Gaussian noise or none, so that sums need no decoder."""
        known_noise = self.noise == "gaussian" and self.bound is not None
        return isinstance(self.form, Numbers) and (known_noise or not self.noisy)

    @property
    def noise_known(self) -> bool:
        """Return whether noise and quantiser are measured in a public bound, or absent."""
        return self.bound is not None or not (self.noisy or isinstance(self.form, Dithered))

    def noise_std(self, n: int, summed: int) -> float | None:
        """Return the standard deviation of the sum's error per coordinate, including the quantiser's error.

        It is None if it is private. All :attr:`senders` send, so ``n`` and ``summed`` have no effect.
        """
        if self.bound is None:
            return 0.0 if self.noise_known else None
        scale = self.noise_multiplier * self.bound
        # A Laplace law of scale b has the variance 2 b^2; a uniform error on a step has step^2 / 12.
        variance = 2 * scale**2 if self.noise == "laplace" else scale**2
        if isinstance(self.form, Dithered):
            variance += self._step(self.bound, self.form) ** 2 / 12
        if isinstance(self.form, Rounded):
            variance += self._rounding_step(self.form) ** 2 / 12
        return math.sqrt(self.senders * variance)

    def send(self, total: Float64[np.ndarray, " d"], sender: Sender) -> EncodedMessage:
        """Return a client's bounded update as its message; zeros for a client without records.

        Args:
            total: (d,) float64, the bounded update.
            sender: the client, round and attempt.
        """
        size = len(total)
        scale = float(np.linalg.norm(total)) if self.bound is None else self.bound
        own = scale if self.bound is None else None
        # An update of zeros has no norm as its scale, and a quantiser of scale 0 does not exist.
        if scale == 0 and not isinstance(self.form, Numbers):
            nothing = CodedMessage(key=bytes(32), message=b"", scale=0.0)
            return EncodedMessage(cost=MessageCost(parameters=size, bytes=0), values=total, coded=nothing)
        if isinstance(self.form, Layered):
            return encode_layered(total, sender, self._law(scale), self.form.lattice, own)
        noisy, source, fine = total, sender.source("channel"), sender.grid
        if self.noisy and scale > 0:
            at_most = None if self.bound is None else sender.grid
            # The exact noise is added before quantisation, so the guarantee does not rest on the quantiser's dither.
            law = self.additive(scale, at_most)
            noisy, fine = total + law.sample((size,), source), law.grid
        if isinstance(self.form, Rounded):
            step = self._rounding_step(self.form)
            steps = (round_to_grid(noisy, fine, step) / step).astype(np.int64)
            message = encode_integers(steps)
            # No key: any reader of the bytes reads the numbers and their noise.
            open_code = CodedMessage(key=bytes(32), message=message)
            return EncodedMessage(cost=MessageCost(parameters=size, bytes=len(message)), coded=open_code)
        if isinstance(self.form, Numbers):
            return EncodedMessage(cost=MessageCost(parameters=size, bytes=FLOAT32_BYTES * size), values=noisy)
        sent, coded = encode_quantized(self._codec(scale, self.form), noisy, sender, source)
        cost = MessageCost(parameters=size, bytes=len(sent.message))
        return EncodedMessage(cost=cost, coded=replace(coded, scale=own))

    def decode(self, coded: CodedMessage, *, senders: int, length: int) -> Float64[np.ndarray, " d"]:
        """Decode a client's update of ``length`` parameters, its noise included.

        Raises:
            CompositionError: messages of this form are no bytes, or their scale is the sender's secret.
            ChannelError: another channel's message, another length, an invalid scale, or altered bytes.
        """
        scale = coded.scale if self.bound is None else self.bound
        if isinstance(self.form, Numbers) or scale is None:
            raise CompositionError("messages are decoded where they are bytes in a scale that is public")
        # The client chooses this scale: NaN or infinity would destroy the sum of all clients. NaN fails the
        # comparison.
        if not 0 <= scale < math.inf:
            raise ChannelError(
                f"a message has the scale {scale}; a finite one is needed, 0 for an update of zeros"
            )
        if scale == 0:
            return np.zeros(length)
        if isinstance(self.form, Rounded):
            return decode_integers(coded.message, length) * self._rounding_step(self.form)
        return self._codec(scale, self.form).decode(coded.message, KeyedStreams(coded.key), length=length)

    def additive(self, scale: float, grid: float | None) -> DiscreteGaussian | DiscreteLaplace:
        """Return the exact law of noise that is added as numbers, on a grid that divides the updates' grid.

        The Gaussian claim counts the noise of all messages in their sum, so the grid keeps that sum exact in float64.
        """
        spread = self.noise_multiplier * scale
        if self.noise == "laplace":
            return DiscreteLaplace(scale=spread, grid=grid_for(spread, at_most=grid))
        if grid is None:
            return DiscreteGaussian(std=spread, grid=grid_for(spread))
        return grid_law(spread, grid, finest_grid(grid, float(self.senders)))

    def _law(self, scale: float) -> GaussianLaw | LaplaceLaw:
        """Return the continuous law of a message's noise."""
        spread = self.noise_multiplier * scale
        return LaplaceLaw(b=spread) if self.noise == "laplace" else GaussianLaw(std=spread)

    def _codec(self, scale: float, form: Layered | Dithered) -> Codec:
        """Return the quantiser whose error is the noise, or the subtractively dithered quantiser."""
        if isinstance(form, Layered):
            return layered_codec(self._law(scale), form.lattice)
        # SDQ is a layered quantiser with a single layer: a uniform error on one cell of step · Z.
        cell = CellLaw(inner_radius=self._step(scale, form) / 2)
        return Codec(quantizer=LayeredQuantizer(law=cell, lattice=Z1))

    def _rounding_step(self, form: Rounded) -> float:
        """Return the coarse grid: the largest 4, 5, 6 or 7 times a power of two that is not above ``form.step``."""
        mantissa, exponent = math.frexp(form.step * self.message_std(self.senders))
        return math.ldexp(math.floor(8 * mantissa), exponent - 3)

    def _step(self, scale: float, form: Dithered) -> float:
        """Return the step of SDQ, in the unit of the update."""
        return form.step * scale * (self.noise_multiplier if self.noisy else 1.0)


# --- the profiles of the CEPAM paper, which fedveil does not support ---

_GAUSSIAN_BASE, _LAPLACE_BASE = 5.9, 5000.0  # epsilon~ with which the paper states its figures
_GAP: Final = (
    "it covers one round and one record of a client, and scales its noise by the norm of a private update that "
    "travels in clear"
)


def one_round(
    *,
    noise: Literal["gaussian", "laplace"],
    noise_multiplier: float,
    clients: int,
    local: Any,
    records: tuple[int, ...] | None,
) -> tuple[Published, ...]:
    """Return Theorem 12 or 13 of CEPAM, if local steps take one record each as its analysis assumes.

    Args:
        noise: law of a message's noise.
        noise_multiplier: sigma / gamma, or b / gamma.
        clients: K.
        local: the local steps.
        records: number of records of every client.
    """
    if getattr(local, "batch_size", None) != 1 or not records or min(records) < 2:
        return ()
    # The client with the fewest records has the largest sampling rate per step, hence the weakest profile.
    steps, fewest = local.count(min(records)), min(records)
    if noise == "laplace":
        # Theorem 13 gives delta = 0 only if epsilon~ >= 2 tau gamma / b.
        base = max(_LAPLACE_BASE, 2 * steps / noise_multiplier)
        profile = laplace_profile(
            steps=steps, records=fewest, b=noise_multiplier, gamma=1.0, base_epsilon=base
        )
        theorem = "Theorem 13"
    else:
        profile = gaussian_profile(
            clients=clients,
            steps=steps,
            records=fewest,
            std=noise_multiplier,
            gamma=1.0,
            base_epsilon=_GAUSSIAN_BASE,
        )
        theorem = "Theorem 12"
    return (_as_published(theorem, profile),)


def _as_published(theorem: str, profile: OneRoundProfile) -> Published:
    gap = _GAP
    if profile.meaningless:
        gap += (
            f"; delta = {profile.delta:.3g} is not below 1 / {profile.records}, so that publishing one of the client's "
            "records outright can satisfy it"
        )

    def of_one_round(rounds: int, delta: float) -> float:
        return profile.epsilon

    return Published(
        name=f"{theorem} of CEPAM, one round, delta = {profile.delta:.3g}", gap=gap, epsilon=of_one_round
    )
