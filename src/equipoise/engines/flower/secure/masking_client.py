"""A node's side of a masked sum; the package `equipoise.engines.flower.secure` describes the protocol."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from equipoise.engines.flower.secure import masks, shares
from equipoise.engines.flower.secure import sum_messages as messages
from equipoise.engines.flower.secure.identities import SIGNATURE_BYTES, Identity, default_colluders
from equipoise.engines.flower.secure.sum_messages import MessageKind
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.errors import require

SEALED_BYTES = 2 * shares.SHARE_BYTES + masks.SEALED_EXTRA
_KEY_SIZES = (masks.PUBLIC_BYTES, masks.PUBLIC_BYTES)
TERMS_BYTES = 32  # of the hash of what a sum is about
_SHARE_SIZES = (shares.SHARE_BYTES, shares.SHARE_BYTES)


class MaskingClient:
    """One client in one masked sum. Each request is answered once, in order; then its secrets are forgotten.

    A request that breaks a rule raises a MaskingError and changes nothing, so that the right one can still be answered.

    With an `identity` it takes part in signed sums alone, among clients whose keys its owner knows.
    """

    def __init__(self, invitation: bytes, me: str, identity: Identity | None = None) -> None:
        self.terms = SumTerms.of_invitation(invitation)
        self.me, self.identity = me, identity
        self._check_identities()
        if me not in self.terms.place:
            raise messages.RefusedTerms(f"{me!r} was invited to {self.terms}, but is not among its clients.", [me])
        self.awaits: MessageKind | None = MessageKind.ROSTER  # the request that comes next; None when all are answered
        self._sealing: EllipticCurvePrivateKey | None = masks.new_key()
        self._masking: EllipticCurvePrivateKey | None = masks.new_key()
        self._seed = os.urandom(masks.SEED_BYTES)
        self._present: tuple[str, ...] = ()  # all who sent keys
        self._peers: dict[str, tuple[bytes, ...]] = {}  # the public keys of the others
        self._dealers: tuple[str, ...] = ()  # all who sent shares
        self._held: dict[str, tuple[bytes, ...]] = {}  # of each dealer, and of itself, a share of b and one of s
        self._subject = b""  # a hash of what the sum is about: model, settings, weights
        self._confirmed = b""  # what it has signed about the survivors

    def _check_identities(self) -> None:
        """Refuse a sum that is signed otherwise than this client's owner demands."""
        terms, identity = self.terms, self.identity
        if (identity is None) != (terms.colluders is None):
            wants = "signed sums only" if identity is not None else "no signed sums: it has no key to sign with"
            raise messages.RefusedTerms(f"{self.me!r} takes part in {wants}.", [self.me])
        if identity is None or terms.colluders is None:
            return
        if strangers := [name for name in terms.clients if name != self.me and not identity.knows(name)]:
            raise messages.RefusedTerms(f"{self.me!r} does not know the keys of {', '.join(strangers[:5])}.", strangers)
        least = default_colluders(len(terms.clients)) if identity.colluders is None else identity.colluders
        if terms.colluders < least:
            reason = f"{terms} withstands {terms.colluders} colluders, and {self.me!r} demands {least}."
            raise messages.RefusedTerms(reason, [self.me])

    def __repr__(self) -> str:
        return f"MaskingClient(me={self.me!r}, sum={self.terms}, awaits={self.awaits.name if self.awaits else None})"

    def keys(self) -> bytes:
        """The answer to the invitation: the two public keys."""
        sealing, masking = self._secret_keys(MessageKind.ROSTER)
        own = (masks.public_of(sealing), masks.public_of(masking))
        signature = self.identity.sign(keys_text(self.terms, self.me, own)) if self.identity is not None else b""
        return self.terms.write(MessageKind.KEYS, self.me.encode(), own[0], own[1] + signature)

    def answer(self, request: bytes, values: Any = None, subject: bytes = b"") -> bytes:
        """The answer to any request after the invitation; `values` and `subject` are used for the inbox only."""
        if (kind := messages.read_kind(request)) == MessageKind.INBOX:
            return self.mask(request, values, subject)
        if kind == MessageKind.CONFIRM:
            return self.confirm(request)
        return self.reveal(request) if kind == MessageKind.SURVIVORS else self.share(request)

    def share(self, roster: bytes) -> bytes:
        """Shares of b and s for each other client, sealed so that only it can read them."""
        sealing, masking = self._secret_keys(MessageKind.ROSTER)
        names, table = self.terms.read(roster, MessageKind.ROSTER, 2)
        present, peers = messages.unpack_names(names), self._read_roster(table)
        self._check_crowd(present, self.terms.clients, "Exchange of keys")
        if set(peers) != set(present) - {self.me}:
            raise messages.MalformedMessage("The roster must have the keys of the clients that are there, and no others.")
        for key in (key for keys in peers.values() for key in keys):
            masks.read_public(key)
        places = tuple(self.terms.place[name] for name in present)
        secrets = (int.from_bytes(self._seed, "big"), masks.secret_of(masking))
        dealt = [shares.split(secret, self.terms.threshold, places) for secret in secrets]
        of = {
            name: (seed.to_bytes(shares.SHARE_BYTES, "big"), key.to_bytes(shares.SHARE_BYTES, "big"))
            for name, seed, key in zip(present, *dealt, strict=True)
        }
        own = (masks.public_of(sealing), masks.public_of(masking))
        sealed = {}
        for name, keys in peers.items():
            about = self._about(self.me, own, name, keys)
            key = masks.derive(masks.agreed_key(sealing, keys[0]), about)
            sealed[name] = (masks.seal(key, b"".join(of[name]), about),)
        self._present, self._peers, self._held = present, peers, {self.me: of[self.me]}
        self.awaits = MessageKind.INBOX
        fixed = masks.commitment(self.terms, self.me, self._seed)
        return self.terms.write(MessageKind.SHARES, self.me.encode(), fixed, messages.pack_table(sealed))

    def _read_roster(self, table: bytes) -> dict[str, tuple[bytes, ...]]:
        """The others' keys; those of a signed sum must have the signatures of the clients that they are said to be from."""
        if self.identity is None:
            return messages.unpack_table(table, _KEY_SIZES)
        peers: dict[str, tuple[bytes, ...]] = {}
        for name, (sealing, masking, signature) in messages.unpack_table(table, (*_KEY_SIZES, SIGNATURE_BYTES)).items():
            peers[name] = (sealing, masking)
            if not self.identity.has_signed(name, keys_text(self.terms, name, peers[name]), signature):
                raise messages.NotSigned(f"The keys that are said to be those of {name!r} do not have its signature.", [name])
        return peers

    def mask(self, inbox: bytes, values: Any, subject: bytes = b"") -> bytes:
        """The values (length,) int64, masked; and who dealt this client shares that it cannot open.

        `subject` is a hash of what the values were made of, which a signed sum binds all clients to.
        """
        good = self.identity is None or len(subject) == TERMS_BYTES
        require(good, "subject", f"of a signed sum must be a hash of {TERMS_BYTES} bytes", len(subject))
        sealing, masking = self._secret_keys(MessageKind.INBOX)
        names, table = self.terms.read(inbox, MessageKind.INBOX, 2)
        dealers, letters = messages.unpack_names(names), messages.unpack_table(table, (SEALED_BYTES,))
        self._check_crowd(dealers, self._present, "Sharing")
        if set(letters) != set(dealers) - {self.me}:
            raise messages.MalformedMessage("The inbox must have the shares of the clients that dealt some, and no others.")
        modulus = self.terms.modulus
        numbers = np.asarray(values)
        shown = f"{numbers.dtype} of shape {numbers.shape}"
        good = numbers.dtype == np.int64 and numbers.shape == (self.terms.length,)
        require(good, "values", f"must be int64 of shape ({self.terms.length},)", shown, "quantise(...) makes whole numbers.")
        total = (numbers % modulus).astype(np.uint64)
        masks.add_mask(total, masks.self_mask(self.terms, self.me, self._seed), modulus)
        own = (masks.public_of(sealing), masks.public_of(masking))
        held, closed = dict(self._held), []
        for name, (letter,) in letters.items():
            keys = self._peers[name]
            words = masks.pair_mask(self.terms, self.me, name, masks.agreed_key(masking, keys[1]))
            masks.add_mask(total, words, modulus, sign=masks.pair_sign(self.me, name))
            about = self._about(name, keys, self.me, own)
            try:
                text = masks.unseal(masks.derive(masks.agreed_key(sealing, keys[0]), about), letter, about)
                held[name] = (text[: shares.SHARE_BYTES], text[shares.SHARE_BYTES :])
            except messages.UnreadableShares:  # others may hold enough of them: the server is told, and the sum goes on
                closed.append(name)
        self._dealers, self._held = dealers, held
        self._sealing = self._masking = None  # so that nothing else can be masked with them
        self._seed, self._subject = b"", subject
        self.awaits = MessageKind.SURVIVORS if self.identity is None else MessageKind.CONFIRM
        masked, complaint = masks.write_residues(total, modulus), messages.pack_names(sorted(closed))
        if self.identity is not None:
            signature = self.identity.sign(subject_text(self.terms, self.me, subject))
            complaint = messages.pack([complaint, subject, signature])
        return self.terms.write(MessageKind.MASKED, self.me.encode(), masked, complaint)

    def confirm(self, survivors: bytes) -> bytes:
        """The signature of who survived, if each of them has signed that it masked the same thing. Once: one list is signed."""
        if self.awaits != MessageKind.CONFIRM or self.identity is None:
            raise messages.OutOfOrder(f"{self.me!r} signs one list of survivors, after masking.", [self.me])
        first, second, table = self.terms.read(survivors, MessageKind.CONFIRM, 3)
        alive, gone = messages.unpack_names(first), messages.unpack_names(second)
        self._check_survivors(set(alive), set(gone))
        signed = messages.unpack_table(table, (SIGNATURE_BYTES,))
        for name in alive:
            text = subject_text(self.terms, name, self._subject)
            if name != self.me and not (name in signed and self.identity.has_signed(name, text, signed[name][0])):
                reason = f"{name!r} has not signed that it was sent the model, settings and weights that {self.me!r} was."
                raise messages.RefusedToReveal(reason, [name])
        self._confirmed = survivors_text(self.terms, alive, gone, self._subject)
        self.awaits = MessageKind.SURVIVORS
        signature = self.identity.sign(self._confirmed)
        return self.terms.write(MessageKind.SIGNED, self.me.encode(), self._subject, signature)

    def reveal(self, survivors: bytes) -> bytes:
        """Of each dealer one share: of b if it survived, of s if it left. Never both, and once.

        Of a signed sum only if enough clients have signed that these survived.
        """
        if self.awaits != MessageKind.SURVIVORS:
            raise messages.OutOfOrder(f"{self.me!r} reveals shares once, after masking.", [self.me])
        signed = self.identity is not None
        first, second, *proof = self.terms.read(survivors, MessageKind.SURVIVORS, 3 if signed else 2)
        names = messages.unpack_names(first), messages.unpack_names(second)
        alive, gone = map(set, names)
        self._check_survivors(alive, gone)
        if signed:
            self._check_signatures(names, messages.unpack_table(proof[0], (SIGNATURE_BYTES,)))
        seeds = {name: (self._held[name][0],) for name in alive & set(self._held)}
        keys = {name: (self._held[name][1],) for name in gone & set(self._held)}
        self._held, self.awaits = {}, None
        return self.terms.write(MessageKind.REVEALED, self.me.encode(), messages.pack_table(seeds), messages.pack_table(keys))

    def _check_signatures(self, names: tuple[tuple[str, ...], tuple[str, ...]], proof: dict[str, tuple[bytes, ...]]) -> None:
        """Refuse to reveal unless as many clients as the sum needs have signed what this one has."""
        assert self.identity is not None  # noqa: S101 — of a signed sum
        if survivors_text(self.terms, *names, self._subject) != self._confirmed:
            raise messages.RefusedToReveal(f"{self.me!r} has signed another list of survivors.", [self.me])
        signed = {name for name, (by,) in proof.items() if self.identity.has_signed(name, self._confirmed, by)}
        signed = (signed & set(names[0])) | {self.me}
        if len(signed) < self.terms.fewest:
            reason = f"{len(signed)} client{'s' * (len(signed) != 1)} signed the same survivors"
            raise messages.RefusedToReveal(f"{reason}, and {self.terms.fewest} are needed.", sorted(set(names[0]) - signed))

    def _check_survivors(self, alive: set[str], gone: set[str]) -> None:
        """Refuse a list of survivors that would undo this client's mask, or leave too small a sum."""
        if both := alive & gone:
            reason = "Both shares of a client would undo its mask: it survived, or it left."
            raise messages.RefusedToReveal(reason, sorted(both))
        if alive | gone != set(self._dealers):
            raise messages.RefusedToReveal("Survivors and those who left must be the clients that dealt shares, all of them.")
        if self.me not in alive:
            raise messages.RefusedToReveal(f"{self.me!r} is said to have left, but has sent its values.", [self.me])
        if len(alive) < self.terms.fewest:
            raise messages.RefusedToReveal(f"A sum over {len(alive)} clients says too much: {self.terms.fewest} were agreed.")

    # -------------------------------------------------------------------------------------------------- between two messages

    def save(self) -> bytes:
        """All that this client knows, secrets included, for the node alone to keep until the next request.

        A state must not be loaded twice: two vectors under one mask give away their difference.
        """
        keys = (self._sealing, self._masking)
        secrets = [b"" if key is None else masks.secret_of(key).to_bytes(masks.PRIVATE_BYTES, "big") for key in keys]
        awaits = bytes([self.awaits or 0])
        names = [messages.pack_names(self._present), messages.pack_names(self._dealers)]
        tables = [messages.pack_table(self._peers), messages.pack_table(self._held)]
        signed = [self._subject, self._confirmed]
        state = messages.pack([self.terms.invitation, self.me.encode(), awaits, *secrets, self._seed, *names, *tables, *signed])
        return hashlib.sha256(state).digest() + state

    @classmethod
    def load(cls, state: bytes, identity: Identity | None = None) -> MaskingClient:
        """The client that was saved; messages.MalformedMessage for other bytes."""
        if not isinstance(state, bytes) or hashlib.sha256(state[32:]).digest() != state[:32]:
            raise messages.MalformedMessage("These bytes are not a client that was saved, or not all of it.")
        invitation, me, awaits, *secrets, present, dealers, peers, held, subject, confirmed = messages.unpack(state[32:], 12)
        sealing, masking, seed = secrets
        client = cls(invitation, messages.read_name(me), identity)
        client._subject, client._confirmed = subject, confirmed
        client.awaits = MessageKind(awaits[0]) if awaits[0] else None
        client._sealing, client._masking = _read_private(sealing), _read_private(masking)
        client._seed = seed
        client._present, client._dealers = messages.unpack_names(present), messages.unpack_names(dealers)
        client._peers, client._held = messages.unpack_table(peers, _KEY_SIZES), messages.unpack_table(held, _SHARE_SIZES)
        return client

    def _secret_keys(self, kind: MessageKind) -> tuple[EllipticCurvePrivateKey, EllipticCurvePrivateKey]:
        if self.awaits != kind or self._sealing is None or self._masking is None:
            waits = f"waits for {self.awaits.name}" if self.awaits else "has answered all"
            raise messages.OutOfOrder(f"{self.me!r} {waits} of {self.terms}, and answers each request once.", [self.me])
        return self._sealing, self._masking

    def _check_crowd(self, names: tuple[str, ...], among: tuple[str, ...], step: str) -> None:
        if not set(names) <= set(among) or self.me not in names:
            raise messages.MalformedMessage(f"{step}: the clients must be some of those before, and this one among them.")
        if len(names) < self.terms.fewest:
            raise messages.SumTooSmall(step, len(names), self.terms.fewest)

    def _about(self, sender: str, sender_keys: tuple[bytes, ...], receiver: str, receiver_keys: tuple[bytes, ...]) -> bytes:
        """What a letter is tied to: the sum (run, round, purpose, all terms), its writer, its reader, and all their keys."""
        return messages.pack([b"shares", self.terms.tag, sender.encode(), *sender_keys, receiver.encode(), *receiver_keys])


def keys_text(terms: SumTerms, owner: str, keys: tuple[bytes, ...]) -> bytes:
    """What a client signs of its keys in a sum."""
    return messages.pack([b"keys of a sum", terms.tag, owner.encode(), *keys])


def subject_text(terms: SumTerms, owner: str, subject: bytes) -> bytes:
    """What a client signs with its masked values: the hash of the model, the settings and the weights that it was sent."""
    return messages.pack([b"subject of a sum", terms.tag, owner.encode(), subject])


def survivors_text(terms: SumTerms, alive: tuple[str, ...], gone: tuple[str, ...], subject: bytes) -> bytes:
    """What a client signs before it reveals: who survived the sum, who left, and what the sum is about."""
    return messages.pack([b"survivors", terms.tag, messages.pack_names(alive), messages.pack_names(gone), subject])


def _read_private(data: bytes) -> EllipticCurvePrivateKey | None:
    return masks.private_from(int.from_bytes(data, "big")) if data else None
