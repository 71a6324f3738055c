"""What masks are made of: agreed keys, sealed letters between clients, and uniform residues from a keyed stream.

Keys are agreed by Diffie–Hellman on P-384 with Flower's helpers. Whatever is made of an agreed key or of a seed goes through
HKDF with an `info` that says what it is for, so that one key never serves two purposes. Masks are ChaCha20's stream under such
a key of 256 bits. Flower's own mask generator is not used: it folds its seed to 32 bits, few enough to try them all.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from numpy.typing import NDArray

from equipoise.engines.flower.flower_internals import agree_on_key, new_private_key
from equipoise.engines.flower.secure.sum_messages import MalformedMessage, UnreadableShares, pack, pack_names
from equipoise.engines.flower.secure.sum_terms import SumTerms

Words = NDArray[np.uint64]

PUBLIC_BYTES = 49  # a compressed point
PRIVATE_BYTES = 48
SEED_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16
SEALED_EXTRA = _NONCE_BYTES + _TAG_BYTES
_WORD = np.dtype("<u8")

# ------------------------------------------------------------------------------------------------------------------------- keys


def new_key() -> ec.EllipticCurvePrivateKey:
    """A private key on P-384, from the operating system's randomness."""
    return new_private_key()


def public_of(private: ec.EllipticCurvePrivateKey) -> bytes:
    """The public key as a compressed point."""
    return private.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def read_public(data: bytes) -> ec.EllipticCurvePublicKey:
    """A public key from its compressed point; what is not a point of the curve is refused."""
    if len(data) != PUBLIC_BYTES:
        raise MalformedMessage(f"A public key has {PUBLIC_BYTES} bytes, but this has {len(data)}.")
    try:
        return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP384R1(), data)
    except ValueError:
        raise MalformedMessage("A public key is not a point of the curve P-384.") from None


def secret_of(private: ec.EllipticCurvePrivateKey) -> int:
    """The private key as a number: what is shared out, and kept between two messages."""
    return private.private_numbers().private_value


def private_from(secret: int) -> ec.EllipticCurvePrivateKey:
    """The private key with this number; MalformedMessage if there is none."""
    try:
        return ec.derive_private_key(secret, ec.SECP384R1())
    except (ValueError, OverflowError):
        raise MalformedMessage("A number is not a private key of the curve P-384.") from None


def agreed_key(private: ec.EllipticCurvePrivateKey, public: bytes) -> bytes:
    """The key that both owners compute, each from its private and the other's public key."""
    return agree_on_key(private, read_public(public))


def derive(key: bytes, info: bytes) -> bytes:
    """32 bytes for one purpose: HKDF with SHA-256 (RFC 5869), no salt."""
    return HKDF(algorithm=hashes.SHA256(), length=32, salt=None, info=info).derive(key)


# --------------------------------------------------------------------------------------------------------------------- letters


def seal(key: bytes, text: bytes, about: bytes) -> bytes:
    """Nonce and ciphertext of ChaCha20-Poly1305; whoever opens it must give the same `about`, which is not sent."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, text, about)


def unseal(key: bytes, sealed: bytes, about: bytes) -> bytes:
    """What was sealed; UnreadableShares if a bit of it, of the key or of `about` differs."""
    try:
        return ChaCha20Poly1305(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], about)
    except (InvalidTag, ValueError):
        raise UnreadableShares("Sealed shares do not open: they were changed, or meant for another sum or client.") from None


# -------------------------------------------------------------------------------------------------------------------- residues


def mask_words(key: bytes, count: int, modulus: int) -> Words:
    """`count` independent residues, uniform on 0 … M − 1, as a pure function of a 32-byte key: (count,).

    They are ChaCha20's stream in 64-bit words. For a power of two the low bits of a word are uniform. For other moduli a word
    is skipped if it lies at or above the largest multiple of M below 2^64, and else reduced: exactly uniform, where a plain
    remainder would prefer small residues. At M ≤ 2^62 at most one word in four is skipped.
    """
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def draw(number: int) -> Words:
        return np.frombuffer(stream.update(bytes(_WORD.itemsize * number)), dtype=_WORD).astype(np.uint64, copy=False)

    if modulus & (modulus - 1) == 0:
        return draw(count) & np.uint64(modulus - 1)
    skipped = (1 << 64) % modulus
    limit = np.uint64((1 << 64) - skipped)
    kept: list[Words] = []
    missing = count
    while missing > 0:  # how many are drawn at a time changes nothing: the words that stay are the stream's, in order
        words = draw(missing + missing * skipped // (1 << 64) + 16)
        words = words[words < limit][:missing]
        kept.append(words)
        missing -= len(words)
    return np.concatenate(kept) % np.uint64(modulus) if kept else draw(0)


def add_mask(total: Words, words: Words, modulus: int, *, sign: int = 1) -> None:
    """Add or take off a mask modulo M, in place; both hold residues, and M ≤ 2^62 leaves room for the sum."""
    np.add(total, words if sign > 0 else np.uint64(modulus) - words, out=total)
    if modulus & (modulus - 1) == 0:
        np.bitwise_and(total, np.uint64(modulus - 1), out=total)
    else:
        np.remainder(total, np.uint64(modulus), out=total)


def centred_total(total: Words, modulus: int) -> NDArray[np.int64]:
    """The representatives in [−M/2, M/2) of residues, as `equipoise.privacy.secure_sum.centred` has them."""
    half = modulus // 2
    return (total.astype(np.int64) + half) % modulus - half


def word_bytes(modulus: int) -> int:
    """How many bytes a residue travels in."""
    return ((modulus - 1).bit_length() + 7) // 8


def write_residues(total: Words, modulus: int) -> bytes:
    """Residues as little-endian numbers of `word_bytes` bytes each."""
    octets = np.ascontiguousarray(total.astype(_WORD, copy=False)).view(np.uint8).reshape(len(total), _WORD.itemsize)
    return octets[:, : word_bytes(modulus)].tobytes()


def read_residues(data: bytes, count: int, modulus: int) -> Words:
    """The residues that `write_residues` wrote; another length, or a number of M or more, is refused."""
    width = word_bytes(modulus)
    if len(data) != count * width:
        raise MalformedMessage(f"A masked vector must have {count} × {width} bytes, but has {len(data)}.")
    octets = np.zeros((count, _WORD.itemsize), dtype=np.uint8)
    octets[:, :width] = np.frombuffer(data, dtype=np.uint8).reshape(count, width)
    words = octets.view(_WORD).reshape(count).astype(np.uint64, copy=False)
    if count and int(words.max()) >= modulus:
        raise MalformedMessage(f"A masked vector holds a number that is not a residue modulo {modulus}.")
    return words


# ----------------------------------------------------------------------------------------------------------- the masks of a sum


def self_mask(terms: SumTerms, owner: str, seed: bytes) -> Words:
    """PRG(b_u): the mask that one client adds alone."""
    return mask_words(derive(seed, pack([b"self mask", terms.tag, owner.encode()])), terms.length, terms.modulus)


def pair_mask(terms: SumTerms, one: str, other: str, agreed: bytes) -> Words:
    """PRG(s_uv): the mask of two clients. `pair_sign` says who adds it and who takes it off."""
    info = pack([b"pair mask", terms.tag, pack_names(sorted((one, other)))])
    return mask_words(derive(agreed, info), terms.length, terms.modulus)


def pair_sign(owner: str, other: str) -> int:
    """The sign with which `owner` uses the mask it shares with `other`."""
    return 1 if other > owner else -1


def commitment(terms: SumTerms, owner: str, seed: bytes) -> bytes:
    """What fixes a seed of 256 random bits without giving it away, so that wrong shares of it are noticed."""
    return hashlib.sha256(pack([b"commitment", terms.tag, owner.encode(), seed])).digest()
