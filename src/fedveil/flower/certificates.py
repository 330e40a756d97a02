"""Certificates and keys of a federation's transport: a CA of its own, TLS for the parties, keys that name the nodes."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.crypto.keys import write_private_file
from fedveil.errors import ConfigError
from fedveil.files import read_content, reading

CA_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 397
_CLOCK_SKEW: Final = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The federation's own certificate authority; who has its key can stand in for the coordinator.

    Attributes:
        key: its private key.
        certificate: what every party trusts, and nothing else.
    """

    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def create(cls, name: str) -> Authority:
        """Return a new authority, valid for ten years."""
        key = ec.generate_private_key(ec.SECP384R1())
        subject = _name(name)
        builder = _builder(subject, subject, key.public_key(), CA_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
        )
        return cls(key=key, certificate=builder.sign(key, SHA256()))

    def issue(self, folder: Path, stem: str, hosts: tuple[str, ...]) -> None:
        """Write ``stem.key`` (0600) and ``stem.crt`` for a server at these host names and addresses."""
        key = ec.generate_private_key(ec.SECP384R1())
        builder = _builder(_name(stem), self.certificate.subject, key.public_key(), CERTIFICATE_DAYS)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
        )
        write_private_file(
            folder / f"{stem}.key",
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
        certificate = builder.sign(self.key, SHA256())
        (folder / f"{stem}.crt").write_bytes(certificate.public_bytes(Encoding.PEM))

    def save(self, folder: Path) -> None:
        """Write ``ca.key`` (0600) and ``ca.crt``."""
        write_private_file(
            folder / "ca.key",
            self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )
        self.publish(folder)

    def publish(self, folder: Path) -> None:
        """Write ``ca.crt`` alone."""
        (folder / "ca.crt").write_bytes(self.certificate.public_bytes(Encoding.PEM))


def write_node_key(folder: Path) -> bytes:
    """Write ``node.key`` (0600), the ECDSA P-384 key by which a SuperNode is known; return its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private_file(
        folder / "node.key", key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    )
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (folder / "node.pub").write_bytes(public + b"\n")
    return public


def node_key_pem(path: Path) -> bytes:
    """Return a node's public key as a SuperLink lists it."""
    with reading(path, ConfigError):
        key = load_ssh_public_key(read_content(path, ConfigError))
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def days_left(path: Path, issuer: Path) -> float:
    """Return for how many days a certificate is still valid.

    Raises:
        ConfigError: missing, no certificate, not of this authority, or not valid at this clock.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        authority = x509.load_pem_x509_certificate(issuer.read_bytes())
        certificate.verify_directly_issued_by(authority)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
    except Exception as error:
        raise ConfigError(f"{path}: no certificate of {issuer.name} ({type(error).__name__})") from None
    now = datetime.now(UTC)
    if now < certificate.not_valid_before_utc or now > certificate.not_valid_after_utc:
        raise ConfigError(
            f"{path}: valid from {certificate.not_valid_before_utc:%Y-%m-%d} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}, and this clock says {now:%Y-%m-%d}; "
            "set the clock, or issue it again"
        )
    return (certificate.not_valid_after_utc - now) / timedelta(days=1)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
