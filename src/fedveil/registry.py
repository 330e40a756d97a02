"""Find stages, methods and data sets by name: built-in ones and those of installed packages.

A package provides a member by an entry point in one of the groups ``fedveil.methods``, ``fedveil.channels``,
``fedveil.protections``, ``fedveil.denoisers``, ``fedveil.optimizers``, ``fedveil.averages``, ``fedveil.samplers``,
``fedveil.local_algorithms``,
``fedveil.accounting_rules``, ``fedveil.data_sets``, ``fedveil.executors``.
The built-in members are in :data:`BUILTINS` and have no entry points: an editable installation keeps the entry points
of the day on which it was installed, and would lack members that were added later.

Listing members does not run their code; :meth:`Member.load` does. In a run between institutions, a silo checks its
policy before it loads a member of another package (:func:`third_party`,
:meth:`fedveil.federation.policy.Policy.check_packages`). A name that two packages provide is refused, so no package
can replace a member of another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from typing import Any, Final

from fedveil.errors import ConfigError, did_you_mean
from fedveil.sanitize import sanitize

KINDS: Final = {
    "methods": "method",
    "channels": "channel",
    "protections": "protection",
    "denoisers": "denoiser",
    "optimizers": "server optimizer",
    "averages": "average",
    "local_algorithms": "local algorithm",
    "samplers": "sampler",
    "accounting_rules": "accounting rule",
    "data_sets": "data set",
    "executors": "executor",
}
"""Kinds of members, each with the name of one member in messages."""

PACKAGE: Final = "fedveil"
"""Name of the distribution with the built-in members."""


def is_own(kind: type[Any]) -> bool:
    """Return whether a class is defined by fedveil or by Python itself, not by another package."""
    return kind.__module__.partition(".")[0] in _TRUSTED_MODULES


_TRUSTED_MODULES: Final = frozenset({PACKAGE, "builtins", "abc", "typing"})

BUILTINS: Final[dict[str, dict[str, str]]] = {
    "methods": {
        "fedavg": "fedveil.methods.fedavg:fedavg",
        "uldp-naive": "fedveil.methods.uldp:uldp_naive",
        "uldp-group": "fedveil.methods.uldp:uldp_group",
        "uldp-sgd": "fedveil.methods.uldp:uldp_sgd",
        "uldp-sgd-w": "fedveil.methods.uldp:uldp_sgd_w",
        "uldp-avg": "fedveil.methods.uldp:uldp_avg",
        "uldp-avg-w": "fedveil.methods.uldp:uldp_avg_w",
        "newton": "fedveil.methods.newton:newton",
        "boosted-trees": "fedveil.methods.boosted_trees:boosted_trees",
        "dp-fed": "fedveil.methods.dp_fed_ls:dp_fed",
        "dp-fed-ls": "fedveil.methods.dp_fed_ls:dp_fed_ls",
        "cepam-gaussian": "fedveil.methods.cepam:cepam_gaussian",
        "cepam-laplace": "fedveil.methods.cepam:cepam_laplace",
        "fl": "fedveil.methods.cepam:fl",
        "fl-sdq": "fedveil.methods.cepam:fl_sdq",
        "fl-gaussian": "fedveil.methods.cepam:fl_gaussian",
        "fl-laplace": "fedveil.methods.cepam:fl_laplace",
        "fl-gaussian-sdq": "fedveil.methods.cepam:fl_gaussian_sdq",
        "fl-laplace-sdq": "fedveil.methods.cepam:fl_laplace_sdq",
        "dp-fedavg": "fedveil.methods.paraaegis:dp_fedavg",
        "ckks-fedavg": "fedveil.methods.paraaegis:ckks_fedavg",
        "serial": "fedveil.methods.paraaegis:serial",
        "varying-dp": "fedveil.methods.paraaegis:varying_dp",
        "stevens": "fedveil.methods.paraaegis:stevens",
        "paraaegis": "fedveil.methods.paraaegis:paraaegis",
    },
    "channels": {
        "additive": "fedveil.methods.named_channels:additive",
        "lrsuq": "fedveil.methods.named_channels:lrsuq",
    },
    "protections": {
        "none": "fedveil.methods.protection_stage:NoProtection",
        "secure-aggregation": "fedveil.methods.secure_aggregation:SecureAggregation",
        "private-weighting": "fedveil.methods.private_weighting:PrivateWeighting",
        "partial-encryption": "fedveil.methods.partial_encryption:PartialEncryption",
    },
    "denoisers": {
        "none": "fedveil.training.server.denoise:NoDenoiser",
        "by-rule": "fedveil.training.server.denoise:ByRule",
        "laplacian": "fedveil.training.server.denoise:Laplacian",
        "james-stein": "fedveil.training.server.denoise:JamesStein",
        "soft-threshold": "fedveil.training.server.denoise:SoftThreshold",
    },
    "optimizers": {
        "sgd": "fedveil.training.server.optimizers:ServerSgd",
        "fedadam": "fedveil.training.server.optimizers:FedAdam",
        "fedyogi": "fedveil.training.server.optimizers:FedYogi",
    },
    "averages": {
        "last": "fedveil.training.server.averages:Last",
        "tail": "fedveil.training.server.averages:Tail",
        "ema": "fedveil.training.server.averages:Ema",
    },
    "local_algorithms": {
        "sgd": "fedveil.training.local_algorithms:PlainSgd",
        "fedprox": "fedveil.training.local_algorithms:FedProx",
    },
    "samplers": {
        "everyone": "fedveil.privacy.sampling:Everyone",
        "poisson": "fedveil.privacy.sampling:PoissonUsers",
        "uniform": "fedveil.privacy.sampling:uniform_clients",
    },
    "accounting_rules": {
        "gaussian": "fedveil.privacy.accounting_rules:GaussianRule",
        "concentrated": "fedveil.privacy.accounting_rules:ConcentratedRule",
        "laplace": "fedveil.privacy.accounting_rules:LaplaceRule",
        "poisson_sampled": "fedveil.privacy.accounting_rules:PoissonSampledRule",
        "sampled_without_replacement": "fedveil.privacy.accounting_rules:FixedSizeRule",
        "mixture_of_gaussians": "fedveil.privacy.accounting_rules:MixtureRule",
    },
    "data_sets": {
        "digits": "fedveil.data.catalogue.digits:DIGITS",
        "mnist": "fedveil.data.catalogue.mnist:MNIST",
        "mnist_canonical": "fedveil.data.catalogue.mnist:MNIST_CANONICAL",
        "mnist_centred": "fedveil.data.catalogue.mnist:MNIST_CENTRED",
        "mnist_rgb": "fedveil.data.catalogue.mnist:MNIST_RGB",
        "svhn": "fedveil.data.catalogue.svhn:SVHN",
        "svhn_subset": "fedveil.data.catalogue.svhn:SVHN_SUBSET",
        "imagenette": "fedveil.data.catalogue.imagenette:IMAGENETTE",
        "imagenette_subset": "fedveil.data.catalogue.imagenette:IMAGENETTE_SUBSET",
        "shakespeare": "fedveil.data.catalogue.shakespeare:SHAKESPEARE",
        "creditcard": "fedveil.data.catalogue.creditcard:CREDITCARD",
        "heart_disease": "fedveil.data.catalogue.heart_disease:HEART_DISEASE",
        "tcga_brca": "fedveil.data.catalogue.tcga_brca:TCGA_BRCA",
    },
    "executors": {
        "dask": "fedveil.run.executors:dask_workers",
        "parsl": "fedveil.run.executors:parsl_workers",
        "ray": "fedveil.run.executors:ray_workers",
    },
}
"""Built-in members: for each kind, ``package.module:object`` by the member's name."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """Registered member whose code is not loaded.

    Attributes:
        kind: a key of :data:`KINDS`.
        name: name of the member in an experiment.
        path: where its code is: ``package.module:object``.
        package: name of the distribution that provides it.
    """

    kind: str
    name: str
    path: str
    package: str

    @property
    def version(self) -> str:
        """Installed version of the package."""
        return version(self.package)

    def load(self) -> Any:
        """Import the module of the member and return its object; this runs the module's code.

        Raises:
            ConfigError: the module cannot be imported or lacks the object; names both and the package.
        """
        try:
            return EntryPoint(name=self.name, value=self.path, group=_group(self.kind)).load()
        # A module of another package may fail in any way at import, even by calling sys.exit().
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{KINDS[self.kind]} '{sanitize(self.name)}' of the package {sanitize(self.package)} cannot be loaded "
                f"from {sanitize(self.path)}: {type(error).__name__}: {sanitize(str(error))}"
            ) from error


@cache
def members(kind: str) -> tuple[Member, ...]:
    """Return the members of a kind: built-in ones in their order, then the others by package and name."""
    builtin = [
        Member(kind=kind, name=name, path=path, package=PACKAGE) for name, path in BUILTINS[kind].items()
    ]
    installed = [
        Member(
            kind=kind,
            name=entry_point.name,
            path=entry_point.value,
            package=entry_point.dist.name if entry_point.dist else "unknown",
        )
        for entry_point in entry_points(group=_group(kind))
    ]
    # Entry points of fedveil itself, for example from stale metadata, never hide or duplicate a built-in member.
    foreign = {member for member in installed if member.package != PACKAGE}
    return (*builtin, *sorted(foreign, key=lambda member: (member.package, member.name, member.path)))


def find(kind: str, name: str) -> Member:
    """Return the one member of this name; its code is not loaded.

    Raises:
        ConfigError: no member or more than one has the name; lists the members and their packages.
    """
    matches = [member for member in members(kind) if member.name == name]
    if len(matches) == 1:
        return matches[0]
    if matches:
        places = " and ".join(f"{sanitize(member.package)} ({sanitize(member.path)})" for member in matches)
        raise ConfigError(
            f"{KINDS[kind]} '{sanitize(name)}' is brought by {places}; uninstall one of them, for a name has "
            "one meaning"
        )
    near = did_you_mean(name, [member.name for member in members(kind)])
    raise ConfigError(
        f"no {KINDS[kind]} '{sanitize(name)}'; there are: {describe_names(kind)}{sanitize(near)}"
    )


def describe_names(kind: str) -> str:
    """Return the names of a kind in words, grouped by the package that provides them."""
    packages = dict.fromkeys(member.package for member in members(kind))
    return "; ".join(
        f"{', '.join(sanitize(member.name) for member in members(kind) if member.package == package)} "
        f"(of {sanitize(package)})"
        for package in packages
    )


def names(kind: str) -> tuple[str, ...]:
    """Return the names of the built-in members of a kind."""
    return tuple(BUILTINS[kind])


def third_party(requested: dict[str, tuple[str, str]]) -> dict[str, Member]:
    """Return the requested members that other packages provide, by configuration key; their code is not loaded.

    Args:
        requested: (kind, name) by configuration key, for instance ``{"method.name": ("methods", "fedavg")}``.

    Raises:
        ConfigError: an unknown or ambiguous name.
    """
    by_key = {key: find(kind, name) for key, (kind, name) in requested.items()}
    return {key: member for key, member in by_key.items() if member.package != PACKAGE}


def _group(kind: str) -> str:
    return f"{PACKAGE}.{kind}"
