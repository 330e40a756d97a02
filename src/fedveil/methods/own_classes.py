"""Check stages whose classes other packages define: refuse members that a run would ignore.

Most stages do their work in methods, so a class of another package can replace them. Some are read by their fields
instead: trainers compute local steps, kernels enforce bounds. Others are read by fields in some compositions only. If
a class defines a member that the composition does not use, a run would behave like the parent class under another
name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from fedveil.errors import CompositionError
from fedveil.privacy.bounds import check_enforced
from fedveil.registry import is_own
from fedveil.stage import ignored, redefined
from fedveil.training.server.denoise import Denoiser
from fedveil.training.steps import check_computed

if TYPE_CHECKING:
    from fedveil.methods.method import Method

_PARTITIONS: Final = ("silo", "pair", "client", "record")
"""Kinds of contributions into which the engine divides records."""


def check_classes(method: Method, duties: Mapping[str, tuple[str, ...]]) -> None:
    """Check that a run uses everything that classes of other packages define for the stages of a method.

    Args:
        method: the composition.
        duties: methods that the stage of each field must override.

    Raises:
        CompositionError: names the stage, its class, and the members that would be ignored.
    """
    if method.released == "models" and not (method.local.sums_records and is_own(type(method.local))):
        check_computed(method.local)
        algorithm = getattr(method.local, "algorithm", None)  # single gradients and DP-SGD have none
        if reason := ignored(algorithm, ("slope",)) if algorithm is not None else "":
            raise CompositionError(
                f"{type(algorithm).__name__}, given as local algorithm, {reason}: redefine slope(), or take the parent "
                "class itself"
            )
    check_enforced(method.bound)
    if reason := ignored(method, ()):
        raise CompositionError(
            f"{type(method).__name__}, a class of methods, {reason}: a run uses the stages of a Method; redefine these"
        )
    for field, names in duties.items():
        reason = "" if field == "local" else ignored(getattr(method, field), names)
        if reason:
            raise CompositionError(
                f"{type(getattr(method, field)).__name__}, given as {field}, {reason}: redefine a method that the "
                "parent class is used through, or take the parent class itself"
            )
    reason = _unused_draw(method) or _other_partition(method) or _unused_estimate(method.denoiser)
    if reason := reason or _unused_scores(method):
        raise CompositionError(reason)


def _unused_draw(method: Method) -> str:
    if method.contribution.by_user or not redefined(method.sampler, "draw"):
        return ""
    return (
        f"{type(method.sampler).__name__}, given as sampler, defines draw(), and nobody is drawn where a contribution "
        f"is that of a {method.contribution.per}: take Everyone()"
    )


def _other_partition(method: Method) -> str:
    per = method.contribution.per
    if per in _PARTITIONS:
        return ""
    return (
        f"{type(method.contribution).__name__}, given as contribution, says per = {per!r}: records are divided by "
        f"{', '.join(_PARTITIONS)}; take one of these"
    )


def _unused_estimate(denoiser: Denoiser) -> str:
    if not redefined(denoiser, "estimate"):
        return ""
    name = type(denoiser).__name__
    if not denoiser.changes and not redefined(denoiser, "changes"):
        return (
            f"{name}, given as denoiser, defines estimate() and inherits changes = False: set changes = True"
        )
    if type(denoiser).resolve is not Denoiser.resolve and not redefined(denoiser, "resolve"):
        return (
            f"{name}, given as denoiser, defines estimate(), and the resolve() that it inherits puts another "
            "denoiser in its place: define resolve() too, or derive from Denoiser"
        )
    return ""


def _unused_scores(method: Method) -> str:
    if not redefined(method.weights, "scores") or redefined(method.weights, "for_groups"):
        return ""
    return (
        f"{type(method.weights).__name__}, given as weights, defines scores() alone, from which weights are computed "
        "where no party has all counts: define for_groups() too, for all other runs"
    )
