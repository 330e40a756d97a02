"""Certificates and keys of a federation's transport: its own authority, TLS keys of the link and of the silos.

A party is known by the digest of its public key (:func:`key_digest`); the names in certificates are for people.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedveil.crypto.keys import (
    Passphrase,
    is_protected,
    protect,
    read_private_file,
    unprotect,
    write_private_file,
)
from fedveil.errors import BusyError, ConfigError, CryptoError
from fedveil.files import read_content, reading, with_host_code

# --- digests of public keys ---

_LARGEST_CACHE: Final = 4096


def public_key_digest(public: Any) -> str:
    """Return the digest (hex) of a public key."""
    return sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def key_and_end(certificate: x509.Certificate) -> tuple[str, datetime]:
    """Return the digest of a certificate's key, and its last moment.

    Raises:
        ValueError, UnsupportedAlgorithm: one of them cannot be read.
    """
    return public_key_digest(certificate.public_key()), certificate.not_valid_after_utc


class KeyDigests:
    """Digests of the keys of certificates, remembered: a member shows the same certificate again and again."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[str, datetime]] = {}

    def __call__(self, certificate: bytes) -> str:
        """Return the digest; empty where a certificate cannot be read."""
        facts = self._read(certificate)
        return "" if facts is None else facts[0]

    def has_expired(self, certificate: bytes) -> bool:
        """Return whether a certificate has expired; one that cannot be read has not."""
        facts = self._read(certificate)
        return facts is not None and datetime.now(UTC) > facts[1]

    def _read(self, certificate: bytes) -> tuple[str, datetime] | None:
        if certificate not in self._known:
            if len(self._known) >= _LARGEST_CACHE:
                self._known.clear()
            try:
                self._known[certificate] = key_and_end(x509.load_der_x509_certificate(certificate))
            except (ValueError, UnsupportedAlgorithm):
                return None
        return self._known[certificate]


CA_DAYS: Final = 3650
CERTIFICATE_DAYS: Final = 397
_KIND: Final = b"authority"
_CLOCK_SKEW: Final = timedelta(hours=1)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The federation's certificate authority; anyone with its key can impersonate the coordinator.

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

    @classmethod
    def load(cls, folder: Path, passphrase: Passphrase | None) -> Authority:
        """Read what :meth:`save` wrote.

        Raises:
            CryptoError: no key of an authority, or another passphrase.
        """
        path = folder / "ca.key"
        content = read_private_file(path)
        with reading(path, CryptoError):
            if is_protected(content):
                if passphrase is None:
                    raise CryptoError(f"{path} takes a passphrase")
                content, _ = unprotect(content, passphrase(), kind=_KIND)
            key = load_pem_private_key(content, password=None)
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise CryptoError(f"{path}: no key of an authority")
            certificate = x509.load_pem_x509_certificate(read_content(folder / "ca.crt", CryptoError))
        return cls(key=key, certificate=certificate)

    def certify(self, request: str, hosts: tuple[str, ...], days: float = CERTIFICATE_DAYS) -> bytes:
        """Return the certificate (PEM) of a server at these host names and addresses, for a certificate request.

        What the request says of names is not read: the charter says them.
        """
        names = x509.SubjectAlternativeName([_host(host) for host in hosts])
        builder = _builder(_name("server"), self.certificate.subject, request_key(request), days)
        return self._signed(builder.add_extension(names, critical=False), ExtendedKeyUsageOID.SERVER_AUTH)

    def certify_silo(self, public: str, name: str, days: float = CERTIFICATE_DAYS) -> bytes:
        """Return the client certificate (PEM) of a silo.

        Args:
            public: its node key (OpenSSH).
            name: the subject's common name, for people.
            days: validity.
        """
        key = load_node_public(public)
        builder = _builder(_name(name), self.certificate.subject, key, days)
        return self._signed(builder, ExtendedKeyUsageOID.CLIENT_AUTH)

    def _signed(self, builder: x509.CertificateBuilder, usage: x509.ObjectIdentifier) -> bytes:
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
        )
        return builder.sign(self.key, SHA256()).public_bytes(Encoding.PEM)

    def save(self, folder: Path, passphrase: bytes | None) -> None:
        """Write ``ca.key`` (0600) and ``ca.crt``; a passphrase opens the key (:mod:`~fedveil.crypto.keys`)."""
        raw = self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        if passphrase is not None:
            named = self.key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
            raw = protect(raw, passphrase, kind=_KIND, public=sha256(named).digest())
        write_private_file(folder / "ca.key", raw)
        self.publish(folder)

    def publish(self, folder: Path) -> None:
        """Write ``ca.crt`` alone."""
        (folder / "ca.crt").write_bytes(self.certificate.public_bytes(Encoding.PEM))


def new_node_key(path: Path) -> tuple[ec.EllipticCurvePrivateKey, bytes]:
    """Write a silo's TLS client key (0600), ECDSA P-384; return it and its public half (OpenSSH)."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return key, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def node_public(path: Path) -> bytes:
    """Return the public half (OpenSSH) of the node key in a file.

    Raises:
        CryptoError: the file is missing, readable by others, or holds none.
    """
    content = read_private_file(path)
    with reading(path, CryptoError):
        key = load_pem_private_key(content, None)
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)


def load_node_public(public: str) -> ec.EllipticCurvePublicKey:
    """Return a node's public key (OpenSSH).

    Raises:
        ConfigError: no key, or one of another kind.
    """
    with reading("a node's public key", ConfigError):
        key = load_ssh_public_key(public.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError("a node's public key is of another kind than P-384")
        return key


def request_key(request: str) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate request (PEM).

    Raises:
        ConfigError: no request, or a key of another kind.
    """
    with reading("a certificate request", ConfigError):
        key = x509.load_pem_x509_csr(request.encode()).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise ConfigError("the certificate request is of another kind of key than P-384")
        return key


def node_key_digest(public: str) -> str:
    """Return the digest (hex) by which the mailbox knows a node's public key (OpenSSH)."""
    return public_key_digest(load_node_public(public))


def server_key_digest(path: Path) -> str:
    """Return the digest (hex) of the public half of a server's TLS key file.

    Raises:
        CryptoError: the file is missing, readable by others, or holds none.
    """
    content = read_private_file(path)
    with reading(path, CryptoError):
        return public_key_digest(load_pem_private_key(content, None).public_key())


def certificate_key_digest(path: Path) -> str:
    """Return the digest (hex) of the key of a certificate file (PEM).

    Raises:
        ConfigError: missing, or no certificate.
    """
    content = read_content(path, ConfigError)
    with reading(path, ConfigError):
        return public_key_digest(x509.load_pem_x509_certificate(content).public_key())


def check_client_certificate(folder: Path) -> float:
    """Check that a silo's client certificate is valid and of its node key; return for how many days it is valid.

    Raises:
        ConfigError: missing, of another key or authority, or not valid at this clock.
        CryptoError: the node key is missing, or others can read it.
    """
    path, key = folder / "client.crt", folder / "node.key"
    public = node_public(key).decode()
    if not path.exists():
        raise ConfigError(
            f"{path}: missing; accept the membership again, with the silo's own .crt that the founder sealed beside it"
        )
    if certificate_key_digest(path) != node_key_digest(public):
        raise ConfigError(f"{path}: of another key than {key.name}; accept the newest membership")
    return days_left(path, folder / "ca.crt")


def new_server_key(path: Path) -> bytes:
    """Write a server's TLS key (0600); return the request (PEM) to certify it."""
    key = ec.generate_private_key(ec.SECP384R1())
    write_private_file(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    request = x509.CertificateSigningRequestBuilder().subject_name(_name("server")).sign(key, SHA256())
    return request.public_bytes(Encoding.PEM)


def days_left(path: Path, issuer: Path, *, now: datetime | None = None) -> float:
    """Return for how many days a certificate is still valid.

    Args:
        path: path of the certificate.
        issuer: path of the authority's certificate.
        now: the present time; None: the time of this host's clock.

    Raises:
        BusyError: it begins later than this clock.
        ConfigError: missing, no certificate, not of this authority, or expired at this clock.
    """
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        authority = x509.load_pem_x509_certificate(issuer.read_bytes())
        certificate.verify_directly_issued_by(authority)
    except OSError as error:
        failed = ConfigError(f"{error.filename}: cannot be read: {error.strerror}")
        raise with_host_code(error, failed) from None
    except Exception as error:
        raise ConfigError(f"{path}: no certificate of {issuer.name} ({type(error).__name__})") from None
    now = now or datetime.now(UTC)
    if now < certificate.not_valid_before_utc or now > certificate.not_valid_after_utc:
        # A clock that is behind may not have been set since the host started.
        kind = BusyError if now < certificate.not_valid_before_utc else ConfigError
        raise kind(
            f"{path}: valid from {certificate.not_valid_before_utc:%Y-%m-%d} to "
            f"{certificate.not_valid_after_utc:%Y-%m-%d}, and this clock says {now:%Y-%m-%d}; "
            "set the clock, or issue it again"
        )
    return (certificate.not_valid_after_utc - now) / timedelta(days=1)


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: float
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
