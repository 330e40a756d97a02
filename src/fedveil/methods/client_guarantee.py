"""What clients that send messages of their own are guaranteed: CEPAM, its baselines, DP-Fed over a channel.

Neighbours differ in the records of one client. She sends a message whatever she holds, so of all messages one moves, by
at most C, and the noise of the others is what it was.

=========  ==============================================================================================
noise      event of a round, against readers of the mean
=========  ==============================================================================================
Gaussian   K messages carry N(0, (z C)^2 I) each, their sum N(0, K (z C)^2 I): multiplier sqrt(K) z
Laplace    her own message carries Laplace(z C) on every coordinate, and she moves by C in l1: multiplier z. The other
           clients' noise is not counted
=========  ==============================================================================================

docs/theory/cepam.md has the argument for vectors of Laplace noise.
"""

from __future__ import annotations

import math
from typing import Final

from fedveil.local.steps import LocalSgd
from fedveil.methods.claims import Federation, Guarantee, Published
from fedveil.methods.client_messages import ClientMessages, Dithered, Form, Layered, Numbers
from fedveil.methods.method import Method
from fedveil.methods.views import View
from fedveil.privacy.closed_form_cepam import OneRoundProfile, gaussian_profile, laplace_profile
from fedveil.privacy.events import Adjacency, Event, GaussianEvent, LaplaceEvent, NoGuarantee
from fedveil.privacy.noise import DiscreteGaussian
from fedveil.privacy.sampling import UniformClients, knowing_one

OF_LAYERS = (
    "messages must travel encrypted: their length and the spreads in them depend on private sums, and so "
    "do the message sizes and information limits in metrics.jsonl",
    "the channel's noise has its law in real numbers; it is computed in float64 from 52-bit uniforms of a ChaCha20 "
    "stream under a fresh key, and epsilon covers neither the rounding nor a broken cipher",
)
"""What no epsilon over a layered quantiser covers."""
KEY_REASON = "the key of a message bounds the error of every parameter, and blocks' spreads depend on the sum"
_CARRIERS: Final[dict[type[Form], str]] = {
    Layered: "the compression error of her message (LRSUQ)",
    Numbers: "added exactly, on a grid",
    Dithered: "added exactly, on a grid, before she quantises (SDQ)",
}
_GAUSSIAN_BASE, _LAPLACE_BASE = 5.9, 5000.0  # epsilon~ with which the paper states its figures


def of_client_messages(method: Method, channel: ClientMessages, federation: Federation) -> Guarantee:
    """Return what one round of messages guarantees to a client."""
    if not channel.noisy:
        return _nothing("the clients' updates travel without noise", channel)
    if channel.bound is None:
        reason = (
            "the noise is scaled by the norm of the private update, and that norm travels in clear "
            "(method.scale = 'norm', as published): no bound on what a client adds, no guarantee"
        )
        return _nothing(reason, channel, _published(method, channel, federation))
    scale = channel.noise_multiplier * channel.bound
    order = "l1" if channel.noise == "laplace" else "l2"
    base = _against(channel, channel.senders)
    law = f"{'Laplace noise of b' if channel.noise == 'laplace' else 'Gaussian noise of std'} = {scale:g}"
    drawn: tuple[str, ...] = ()
    if isinstance(method.sampler, UniformClients):
        one_of = f"{method.sampler.sample} of {method.sampler.population} clients"
        drawn = (f"{one_of} take part in a round, drawn uniformly without replacement",)
    return Guarantee(
        adjacency=method.sampler.adjacency,
        event=method.sampler.event(base),
        mechanisms=(
            f"every round: each of {channel.senders} clients sends its update, at most {channel.bound:g} long "
            f"({order}), with {law}: {_CARRIERS[type(channel.form)]}",
            "a client without records sends its noise all the same",
            *drawn,
        ),
        views=(
            _server(channel),
            View(
                party="one client",
                sees="the models, and its own noise; guaranteed to every other client",
                event=knowing_one(method.sampler).event(_against(channel, channel.senders - 1)),
            ),
        ),
        uncovered=OF_LAYERS if isinstance(channel.form, Layered) else (),
        grid_loss=_grid_loss(method, channel, channel.bound),
    )


def _against(channel: ClientMessages, unknown: int) -> Event:
    """Return the event of the mean for whoever knows all shares of noise but those of ``unknown`` clients."""
    if unknown < 1:
        return NoGuarantee(reason="no share of the noise is left")
    if channel.noise == "laplace":
        return LaplaceEvent(noise_multiplier=channel.noise_multiplier)
    return GaussianEvent(noise_multiplier=channel.noise_multiplier * math.sqrt(unknown))


def _server(channel: ClientMessages) -> View:
    if isinstance(channel.form, Layered):
        sees = f"every client's message and the latents and dithers of its key: it is trusted, because {KEY_REASON}"
        return View(
            party="the server, and whoever holds the key of a message",
            sees=sees,
            event=NoGuarantee(reason=KEY_REASON),
        )
    sees = "every client's own noisy update, and who takes part"
    return View(party="the server", sees=sees, event=_against(channel, 1))


def _grid_loss(method: Method, channel: ClientMessages, bound: float) -> float:
    """Return what noise on a grid, rather than of real numbers, costs a coordinate of a round in epsilon."""
    if isinstance(channel.form, Layered):
        return 0.0
    law = channel.additive(bound, method.bound.grid)
    if isinstance(law, DiscreteGaussian):
        return 2 * channel.senders * law.log_ratio_to_gaussian
    return 2 * law.log_ratio_to_laplace


def _nothing(reason: str, channel: ClientMessages, published: tuple[Published, ...] = ()) -> Guarantee:
    event = NoGuarantee(reason=reason)
    seen = "noisy update" if channel.noisy else "update"
    return Guarantee(
        adjacency=Adjacency.ADD_OR_REMOVE_ONE,
        event=event,
        views=(View(party="the server", sees=f"every client's own {seen}", event=event),),
        published=published,
    )


def _published(method: Method, channel: ClientMessages, federation: Federation) -> tuple[Published, ...]:
    """Return the one-round profile of the paper, if local steps take one record each as its analysis assumes."""
    local, sizes = method.local, federation.silo_records
    if not isinstance(local, LocalSgd) or local.batch_size != 1 or not sizes or min(sizes) < 2:
        return ()
    theorem, profile = _profile(channel, steps=local.count(min(sizes)), records=min(sizes))
    gap = (
        "it covers one round and one record of a client, and scales its noise by the norm of a private update that "
        "travels in clear"
    )
    if profile.meaningless:
        gap += (
            f"; delta = {profile.delta:.3g} is not below 1 / {profile.records}, so publishing one of the client's "
            "records outright may meet it"
        )

    def of_one_round(rounds: int, delta: float) -> float:
        return profile.epsilon

    name = f"{theorem} of CEPAM, one round, delta = {profile.delta:.3g}"
    return (Published(name=name, gap=gap, epsilon=of_one_round),)


def _profile(channel: ClientMessages, *, steps: int, records: int) -> tuple[str, OneRoundProfile]:
    """Return the theorem and its profile, at the epsilon~ with which the paper states its figures."""
    if channel.noise == "laplace":
        base = max(_LAPLACE_BASE, 2 * steps / channel.noise_multiplier)
        b = channel.noise_multiplier
        return "Theorem 13", laplace_profile(steps=steps, records=records, b=b, gamma=1.0, base_epsilon=base)
    return "Theorem 12", gaussian_profile(
        clients=channel.senders,
        steps=steps,
        records=records,
        std=channel.noise_multiplier,
        gamma=1.0,
        base_epsilon=_GAUSSIAN_BASE,
    )
