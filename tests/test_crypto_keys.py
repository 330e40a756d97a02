"""Identity keys, agreement, authenticated encryption, masks, secret sharing."""

import errno
import os
import stat
import struct
from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedveil.crypto.key_agreement import (
    OVERHEAD_BYTES,
    AgreementKey,
    RoundId,
    SignedKey,
    derive,
    seal,
    unseal,
)
from fedveil.crypto.keys import IdentityKey, PublicIdentity
from fedveil.crypto.masks import UniformIntegers, apply_masks_
from fedveil.crypto.shamir import PRIME, Share, combine, consistent, odd_one_out, split
from fedveil.errors import CryptoError

MOMENT = RoundId(run=bytes(range(16)), round=3, attempt=1)
FALSE_ALARM = 1e-6


def test_an_identity_key_file_is_private_and_never_overwritten(tmp_path):
    path = tmp_path / "silo.pem"
    key = IdentityKey.generate()
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    IdentityKey.load(path).public.verify(b"x", key.sign(b"x"))
    with pytest.raises(CryptoError, match="never overwritten"):
        key.save(path)
    path.chmod(0o640)
    with pytest.raises(CryptoError, match="0640"):
        IdentityKey.load(path)


@pytest.mark.parametrize(("step", "done"), [("write", []), ("fsync", []), ("fsync", [None])])
def test_a_key_for_which_the_disk_has_no_room_leaves_no_file(tmp_path, monkeypatch, step, done):
    """Half a key would never be overwritten, and no party could be founded under its name."""
    path = tmp_path / "silo.pem"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as patched:
        patched.setattr(os, step, Mock(side_effect=[*done, full]))
        with pytest.raises(CryptoError, match=r"silo\.pem cannot be written: No space left"):
            IdentityKey.generate().save(path)
    assert not path.exists()
    IdentityKey.generate().save(path)
    IdentityKey.load(path)


def test_what_is_no_key_is_refused(tmp_path):
    path = tmp_path / "garbage"
    path.write_bytes(b"garbage")
    path.chmod(0o600)
    with pytest.raises(CryptoError, match="no unencrypted private key"):
        IdentityKey.load(path)
    with pytest.raises(CryptoError, match="cannot be read"):
        IdentityKey.load(tmp_path / "absent")
    with pytest.raises(CryptoError, match="32 bytes"):
        PublicIdentity(b"short")


def test_points_of_small_order_are_nobodys_identity():
    """Under them a signature that nobody made holds: for O of every message, for the others of one in eight."""
    eighth = "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"
    negative = "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"
    field = 2**255 - 19
    known = [bytes.fromhex(eighth), bytes.fromhex(negative)]
    known += [y.to_bytes(32, "little") for y in (0, 1, field - 1, field, field + 1)]
    nobody = (1).to_bytes(32, "little") + bytes(32)
    assert any(_holds(raw, b"%d" % number, nobody) for raw in known for number in range(40))
    for raw in known:
        for signed in (raw, raw[:31] + bytes([raw[31] | 0x80])):
            with pytest.raises(CryptoError, match="small order"):
                PublicIdentity(signed)
    for _ in range(20):
        IdentityKey.generate().public  # noqa: B018 (is none)


def _holds(public, message, signature):
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def test_a_signature_holds_for_one_key_owner_purpose_and_moment():
    identity, other = IdentityKey.generate(), IdentityKey.generate()
    public = AgreementKey.generate().public
    signed = SignedKey.sign(identity, public, owner=2, purpose="sum", round_id=MOMENT)
    signed.verify(identity.public, owner=2, purpose="sum", round_id=MOMENT)
    later = RoundId(run=MOMENT.run, round=3, attempt=2)
    wrong = [
        (signed, other.public, 2, "sum", MOMENT),
        (signed, identity.public, 1, "sum", MOMENT),
        (signed, identity.public, 2, "weights", MOMENT),
        (signed, identity.public, 2, "sum", later),
        (SignedKey(public=bytes(32), signature=signed.signature), identity.public, 2, "sum", MOMENT),
        (SignedKey(public=public, signature=bytes(64)), identity.public, 2, "sum", MOMENT),
    ]
    for key, public_identity, owner, purpose, round_id in wrong:
        with pytest.raises(CryptoError, match="not valid"):
            key.verify(public_identity, owner=owner, purpose=purpose, round_id=round_id)


def test_both_sides_derive_the_same_key_and_no_two_uses_share_one():
    a, b = AgreementKey.generate(), AgreementKey.generate()
    ours, theirs = a.agree(b.public), b.agree(a.public)
    moments = [
        RoundId(run=run, round=round_number, attempt=attempt)
        for run in (bytes(16), bytes(15) + b"1")
        for round_number in (0, 1)
        for attempt in (0, 1)
    ]
    keys = {ours.derive(purpose, round_id) for purpose in ("mask", "seed") for round_id in moments}
    assert keys == {theirs.derive(purpose, round_id) for purpose in ("mask", "seed") for round_id in moments}
    assert len(keys) == 16
    assert derive(bytes(32), "a", MOMENT) != derive(bytes(32), "a", MOMENT, salt=b"b")


@pytest.mark.parametrize("point", [bytes(32), b"\x01" + bytes(31), b"short"])
def test_points_of_small_order_are_refused(point):
    with pytest.raises(CryptoError, match="not a usable"):
        AgreementKey.generate().agree(point)


def test_a_moment_fits_its_encoding():
    with pytest.raises(CryptoError, match="16 bytes"):
        RoundId(run=b"", round=0, attempt=0)
    with pytest.raises(CryptoError, match="at most"):
        RoundId(run=bytes(16), round=2**32, attempt=0)


def test_a_private_agreement_key_survives_its_bytes():
    key = AgreementKey.generate()
    assert AgreementKey.from_bytes(key.private_bytes()).public == key.public
    with pytest.raises(CryptoError, match="32 bytes"):
        AgreementKey.from_bytes(b"")


@given(st.binary(max_size=100), st.binary(max_size=20))
@settings(max_examples=30)
def test_sealed_messages_open_only_unaltered(plaintext, associated):
    key = os.urandom(32)
    sealed = seal(key, plaintext, associated)
    assert len(sealed) == len(plaintext) + OVERHEAD_BYTES
    assert unseal(key, sealed, associated) == plaintext
    altered = bytes([sealed[-1] ^ 1])
    for bad_key, bad, bad_associated in (
        (bytes(32), sealed, associated),
        (key, sealed[:-1] + altered, associated),
        (key, sealed, associated + b"x"),
        (key, sealed[:10], associated),
    ):
        with pytest.raises(CryptoError, match="sealed message"):
            unseal(bad_key, bad, bad_associated)


@pytest.mark.parametrize("dtype", ["<u4", "<u8"])
@pytest.mark.parametrize("length", [0, 1, 5, 32_768, 65_537, 200_001])
def test_a_mask_comes_off_again_and_is_the_raw_keystream(dtype, length):
    key = bytes(range(32))
    words = np.arange(length).astype(dtype)
    apply_masks_(words, [(key, True)])
    if length > 4:
        assert np.mean(words == np.arange(length).astype(dtype)) < 0.5
    zero = np.zeros(length, dtype=dtype)
    apply_masks_(zero, [(key, True)])
    np.testing.assert_array_equal(zero + np.arange(length).astype(dtype), words)
    apply_masks_(words, [(key, False)])
    np.testing.assert_array_equal(words, np.arange(length).astype(dtype))


def test_many_masks_at_once_are_those_of_each_key():
    keys = [bytes([number]) * 32 for number in range(1, 5)]
    signs = [True, False, False, True]
    words = np.arange(50_001, dtype="<u8")
    one_by_one = words.copy()
    apply_masks_(words, zip(keys, signs, strict=True))
    for key, adds in zip(keys, signs, strict=True):
        apply_masks_(one_by_one, [(key, adds)])
    np.testing.assert_array_equal(words, one_by_one)
    apply_masks_(words, [(key, not adds) for key, adds in zip(keys, signs, strict=True)])
    np.testing.assert_array_equal(words, np.arange(50_001))


def test_masks_refuse_other_words_and_keys():
    with pytest.raises(CryptoError, match="uint32 or uint64"):
        apply_masks_(np.zeros(3), [(bytes(32), True)])
    with pytest.raises(CryptoError, match="32 bytes"):
        apply_masks_(np.zeros(3, dtype="<u8"), [(bytes(31), True)])


def test_mask_bytes_are_uniform():
    words = np.zeros(2**17, dtype="<u8")
    apply_masks_(words, [(bytes(range(32)), True)])
    octets = words.view(np.uint8)
    assert stats.chisquare(np.bincount(octets, minlength=256)).pvalue > FALSE_ALARM
    biased = np.where(
        np.arange(octets.size) % 50 == 0, octets & 0x7F, octets
    )  # the test would notice 1 % of a bit
    assert stats.chisquare(np.bincount(biased, minlength=256)).pvalue < FALSE_ALARM


@pytest.mark.parametrize("modulus", [1, 2, 3, 7, 1000, 2**61 + 1])
def test_uniform_integers_are_uniform_and_alike_for_both_holders(modulus):
    key = bytes(range(32))
    drawn = UniformIntegers(key, modulus).take(4000)
    assert drawn == UniformIntegers(key, modulus).take(4000)
    assert all(0 <= value < modulus for value in drawn)
    bins = min(modulus, 7)
    counts = np.bincount([int(value) * bins // modulus for value in drawn], minlength=bins)
    if modulus in (2, 3, 7, 2**61 + 1):
        assert stats.chisquare(counts).pvalue > FALSE_ALARM


@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.integers(0, 5), st.randoms())
@settings(max_examples=40)
def test_enough_shares_give_the_secret_back(secret, threshold, spare, random):
    shares = list(split(secret, holders=threshold + spare, threshold=threshold))
    random.shuffle(shares)
    assert combine(shares[:threshold], threshold=threshold) == secret
    if threshold > 1:
        with pytest.raises(CryptoError, match="needed"):
            combine(shares[: threshold - 1], threshold=threshold)
        with pytest.raises(CryptoError, match="needed"):
            combine([shares[0]] * threshold, threshold=threshold)


def test_shares_are_checked():
    with pytest.raises(CryptoError, match="threshold"):
        split(bytes(32), holders=2, threshold=3)
    with pytest.raises(CryptoError, match="32 bytes"):
        split(b"", holders=2, threshold=2)
    with pytest.raises(CryptoError, match="outside the field"):
        combine([Share(point=1, value=PRIME.to_bytes(33, "big"))], threshold=1)


def test_one_share_too_few_is_uniform():
    """The secret 0 and the secret 2^256 - 1 give shares of the same law."""
    for secret in (bytes(32), b"\xff" * 32):
        top = [split(secret, holders=2, threshold=2)[0].value[1] for _ in range(4000)]
        assert stats.chisquare(np.bincount(np.array(top) // 32, minlength=8)).pvalue > FALSE_ALARM


def test_a_sealed_message_has_a_nonce_of_its_own():
    """Two messages under one nonce show their difference, and let whoever reads them forge more."""
    key, plaintext = os.urandom(32), bytes(64)
    sealed = [seal(key, plaintext, b"") for _ in range(100)]
    assert len({one[:12] for one in sealed}) == len({one[12:] for one in sealed}) == 100
    difference = np.frombuffer(sealed[0], np.uint8)[12:-16] ^ np.frombuffer(sealed[1], np.uint8)[12:-16]
    assert np.count_nonzero(difference) > 48


def test_a_signed_key_says_that_it_is_one():
    """The same identity signs messages and lists: none of them may pass for a key, nor a key for them."""
    identity, public = IdentityKey.generate(), AgreementKey.generate().public
    signed = SignedKey.sign(identity, public, owner=2, purpose="sum", round_id=MOMENT)
    statement = struct.pack(">IH", 2, 3) + b"sum" + MOMENT.encode() + public
    identity.public.verify(b"fedveil/1/agreement-key" + statement, signed.signature)
    for other in (b"", b"fedveil/1", b"fedveil/1/letter"):
        with pytest.raises(CryptoError):
            identity.public.verify(other + statement, signed.signature)


def test_shares_that_are_not_of_one_secret_show_where_there_are_more_than_the_threshold() -> None:
    shares = split(bytes(range(32)), holders=7, threshold=4)
    wrong = [*shares[:6], Share(point=7, value=bytes(33))]
    assert consistent(shares, threshold=4)
    assert consistent(shares[1:5], threshold=4)
    assert not consistent(wrong, threshold=4)
    assert odd_one_out(wrong, lambda some: consistent(some, threshold=4)) == wrong[6]
    assert odd_one_out(wrong[2:], lambda some: consistent(some, threshold=4)) is None
