"""The server's side of a masked sum; the package `equipoise.engines.flower.secure` describes the protocol."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray

from equipoise.engines.flower.secure import masks, shares
from equipoise.engines.flower.secure import sum_messages as messages
from equipoise.engines.flower.secure.identities import SIGNATURE_BYTES, is_signed
from equipoise.engines.flower.secure.masking_client import SEALED_BYTES, TERMS_BYTES, keys_text, subject_text, survivors_text
from equipoise.engines.flower.secure.sum_messages import MessageKind
from equipoise.engines.flower.secure.sum_terms import SumTerms

_COMMITMENT_BYTES = 32
_STEPS = {
    MessageKind.KEYS: "Exchange of keys",
    MessageKind.SHARES: "Sharing",
    MessageKind.MASKED: "Masking",
    MessageKind.SIGNED: "Signing",
    MessageKind.REVEALED: "Unmasking",
}
Requests = dict[str, bytes]


class MaskingServer:
    """One masked sum. `start` and then `advance` give the requests to send, by client; no more of them: `total` is there.

    A client whose answer is missing or refused is left out from then on, and named with the reason in `faults`. When too few
    are left `advance` raises (SumTooSmall, LostSecret), and nothing was learned; the step stays open, so that
    late answers may still be handed to `advance`. To try again, make new terms.

    `survivors` are the clients whose values are in the sum. A client may be among them and in `faults` too, if it fell silent
    after masking.

    The signatures of a signed sum are for the clients to check. If the server knows their public keys (`identities`), it
    leaves out whoever signs wrongly, before the others refuse the sum for it.
    """

    def __init__(self, terms: SumTerms, identities: Mapping[str, bytes] | None = None) -> None:
        self.terms, self.identities = terms, identities or {}
        self.faults: dict[str, messages.MaskingError] = {}
        self.survivors: tuple[str, ...] = ()
        self._awaits: MessageKind | None = None
        self._steps: dict[MessageKind, tuple[Callable[[str, bytes, bytes], None], Callable[[frozenset[str]], Requests]]] = {
            MessageKind.KEYS: (self._take_keys, self._close_keys),
            MessageKind.SHARES: (self._take_shares, self._close_shares),
            MessageKind.MASKED: (self._take_masked, self._close_masked),
            MessageKind.SIGNED: (self._take_signed, self._close_signed),
            MessageKind.REVEALED: (self._take_revealed, self._close_revealed),
        }
        self._expected: frozenset[str] = frozenset(terms.clients)
        self._answered: set[str] = set()
        self._present: frozenset[str] = frozenset()  # all who sent keys
        self._keys: dict[str, tuple[bytes, ...]] = {}  # for letters and masks; with a signature in a signed sum
        self._subjects: dict[str, tuple[bytes, bytes]] = {}  # what each survivor says that the sum is about, and its signature
        self._signed: dict[str, bytes] = {}  # signatures of who survived
        self._sealed: dict[str, dict[str, tuple[bytes, ...]]] = {}
        self._commitments: dict[str, bytes] = {}
        self._dealers: frozenset[str] = frozenset()  # all who sent shares
        self._closed: dict[str, frozenset[str]] = {}  # whose shares each client could not open
        self._shares: dict[str, dict[int, int]] = {}  # of each client's one secret, by place
        self._sum = np.zeros(terms.length, dtype=np.uint64)
        self._total: NDArray[np.int64] | None = None

    @property
    def total(self) -> NDArray[np.int64]:
        """The sum of the survivors' values modulo M, centred in [−M/2, M/2): (length,) int64."""
        if self._total is None:
            raise messages.OutOfOrder(f"The sum of {self.terms} is not finished.")
        return self._total

    def start(self) -> Requests:
        """Invitations for all clients."""
        if self._awaits is not None or self._total is not None:
            raise messages.OutOfOrder(f"{self.terms} has begun already.")
        self._awaits = MessageKind.KEYS
        return dict.fromkeys(self.terms.clients, self.terms.invitation)

    def receive(self, client: str, message: bytes) -> None:
        """Take one answer, from the client that the network says it comes from; a bad one raises RefusedMessage."""
        if self._awaits is None:
            raise messages.OutOfOrder(f"No answers are expected for {self.terms}.", [client])
        if client not in self._expected:
            raise messages.UnknownSender(f"{_STEPS[self._awaits]}: {client!r} has no part in this step.", [client])
        if client in self._answered:
            raise messages.DuplicateMessage(f"{_STEPS[self._awaits]}: {client!r} has answered already.", [client])
        try:
            sender, first, second = self.terms.read(message, self._awaits, 3)
            if sender != client.encode():
                raise messages.UnknownSender("The message speaks in another client's name.")
            take, _ = self._steps[self._awaits]
            take(client, first, second)
        except messages.MaskingError as error:
            raise type(error)(f"{_STEPS[self._awaits]}: {client!r}: {error}", [client]) from None
        self._answered.add(client)
        self.faults.pop(client, None)

    def advance(self, answers: Mapping[str, bytes]) -> Requests:
        """Take these answers, close the step, and give the next requests; none when the sum is finished."""
        if self._awaits is None:
            raise messages.OutOfOrder(f"No answers are expected for {self.terms}.")
        for client, message in answers.items():
            try:
                self.receive(client, message)
            except messages.MaskingError as error:
                self.faults[client] = error
        here = frozenset(self._answered)
        for client in self._expected - here:
            self.faults.setdefault(client, messages.NoReply(f"{_STEPS[self._awaits]}: {client!r} did not answer.", [client]))
        _, close = self._steps[self._awaits]
        requests = close(here)
        self._awaits = self._following(self._awaits) if requests else None
        self._expected, self._answered = here, set()
        return requests

    def _following(self, step: MessageKind) -> MessageKind:
        """The answers that come after those of a step."""
        if self.terms.colluders is not None and step == MessageKind.MASKED:
            return MessageKind.SIGNED
        return MessageKind.REVEALED if step == MessageKind.SIGNED else MessageKind(step + 2)

    # ------------------------------------------------------------------------------------------------------------ each answer

    def _take_keys(self, client: str, sealing: bytes, masking: bytes) -> None:
        masking, signature = masking[: masks.PUBLIC_BYTES], masking[masks.PUBLIC_BYTES :]
        masks.read_public(sealing)
        masks.read_public(masking)
        if len(signature) != (SIGNATURE_BYTES if self.terms.colluders is not None else 0):
            raise messages.NotSigned("Its keys must be signed in a signed sum, and in no other.")
        self._check_signature(client, keys_text(self.terms, client, (sealing, masking)), signature)
        self._keys[client] = (sealing, masking, signature) if signature else (sealing, masking)

    def _check_signature(self, client: str, text: bytes, signature: bytes) -> None:
        if client in self.identities and not is_signed(self.identities[client], text, signature):
            raise messages.NotSigned("Its signature is not that of the key it came with.")

    def _take_shares(self, client: str, commitment: bytes, table: bytes) -> None:
        sealed = messages.unpack_table(table, (SEALED_BYTES,))
        if set(sealed) != self._present - {client} or len(commitment) != _COMMITMENT_BYTES:
            raise messages.MalformedMessage("There must be one sealed letter for each other client, and a commitment.")
        self._sealed[client], self._commitments[client] = sealed, commitment

    def _take_masked(self, client: str, masked: bytes, closed: bytes) -> None:
        if self.terms.colluders is not None:
            closed, subject, signature = messages.unpack(closed, 3)
            if len(signature) != SIGNATURE_BYTES or len(subject) != TERMS_BYTES:
                raise messages.NotSigned("It must have signed a hash of what the sum is about.")
            self._check_signature(client, subject_text(self.terms, client, subject), signature)
            self._subjects[client] = subject, signature
        names = frozenset(messages.unpack_names(closed))
        if not names <= self._dealers - {client}:
            raise messages.MalformedMessage("It complains about shares that it was not sent.")
        words = masks.read_residues(masked, self.terms.length, self.terms.modulus)
        self._closed[client] = names
        masks.add_mask(self._sum, words, self.terms.modulus)  # at once: no client's vector is kept

    def _take_signed(self, client: str, subject: bytes, signature: bytes) -> None:
        if len(signature) != SIGNATURE_BYTES or len(subject) != TERMS_BYTES:
            raise messages.MalformedMessage("It must have signed the survivors and a hash of what the sum is about.")
        names = self.survivors, tuple(sorted(self._dealers.difference(self.survivors)))
        if subject != self._subjects[client][0]:
            raise messages.NotSigned("It has signed another subject than with its values.")
        self._check_signature(client, survivors_text(self.terms, *names, subject), signature)
        self._signed[client] = signature

    def _take_revealed(self, client: str, seeds: bytes, keys: bytes) -> None:
        alive = frozenset(self.survivors)
        of_seeds, of_keys = (messages.unpack_table(table, (shares.SHARE_BYTES,)) for table in (seeds, keys))
        wanted = self._dealers - self._closed[client]
        if set(of_seeds) != wanted & alive or set(of_keys) != wanted - alive:
            rule = "It must reveal a share of b of each survivor, and of s of each that left, that it holds."
            raise messages.MalformedMessage(rule)
        revealed = {name: int.from_bytes(part[0], "big") for name, part in (of_seeds | of_keys).items()}
        if any(value >= shares.PRIME for value in revealed.values()):
            raise messages.MalformedMessage("A share is not a number of the field.")
        for name, value in revealed.items():
            self._shares.setdefault(name, {})[self.terms.place[client]] = value

    # -------------------------------------------------------------------------------------------------------------- each step

    def _close_keys(self, here: frozenset[str]) -> Requests:
        self._require_enough(here)
        self._present = here
        return self._tell_others(MessageKind.ROSTER, here, lambda sender, _: self._keys[sender])

    def _close_shares(self, here: frozenset[str]) -> Requests:
        self._require_enough(here)
        self._dealers = here
        return self._tell_others(MessageKind.INBOX, here, lambda sender, reader: self._sealed[sender][reader])

    def _close_masked(self, here: frozenset[str]) -> Requests:
        self._require_enough(here)
        opened = {name: sum(name not in self._closed[holder] for holder in here) for name in self._dealers}
        if lost := [name for name, holders in opened.items() if holders < self.terms.threshold]:
            raise self._lost("Masking: shares that {} dealt do not open. Try again without.", lost)
        self.survivors = tuple(sorted(here))
        if self.terms.colluders is None:
            return dict.fromkeys(self.survivors, self.terms.write(MessageKind.SURVIVORS, *self._survivors_and_gone()))
        usual, _ = Counter(subject for subject, _ in self._subjects.values()).most_common(1)[0]
        if odd := [client for client, (subject, _) in self._subjects.items() if subject != usual]:
            raise self._lost("Masking: {} were sent something else than the others. Try again without.", odd)
        table = messages.pack_table({client: (signature,) for client, (_, signature) in self._subjects.items()})
        return dict.fromkeys(self.survivors, self.terms.write(MessageKind.CONFIRM, *self._survivors_and_gone(), table))

    def _survivors_and_gone(self) -> tuple[bytes, bytes]:
        gone = sorted(self._dealers.difference(self.survivors))
        return messages.pack_names(self.survivors), messages.pack_names(gone)

    def _close_signed(self, here: frozenset[str]) -> Requests:
        """Pass all signatures on."""
        self._require_enough(here)
        proof = messages.pack_table({client: (signature,) for client, signature in self._signed.items()})
        return dict.fromkeys(sorted(here), self.terms.write(MessageKind.SURVIVORS, *self._survivors_and_gone(), proof))

    def _close_revealed(self, here: frozenset[str]) -> Requests:
        modulus, total = self.terms.modulus, self._sum.copy()
        for name in self.survivors:
            seed = self._recover(name, partial(self._is_seed, name)).to_bytes(masks.SEED_BYTES, "big")
            masks.add_mask(total, masks.self_mask(self.terms, name, seed), modulus, sign=-1)
        for name in sorted(self._dealers.difference(self.survivors)):
            private = masks.private_from(self._recover(name, partial(self._is_key, name)))
            for other in self.survivors:
                words = masks.pair_mask(self.terms, name, other, masks.agreed_key(private, self._keys[other][1]))
                masks.add_mask(total, words, modulus, sign=-masks.pair_sign(other, name))
        self._total = masks.centred_total(total, modulus)
        self._shares, self._sealed = {}, {}
        return {}

    # ---------------------------------------------------------------------------------------------------------------- helpers

    def _require_enough(self, here: frozenset[str]) -> None:
        """Refuse to go on with fewer clients than agreed."""
        if len(here) < self.terms.fewest:
            step = _STEPS[self._awaits or MessageKind.KEYS]
            raise messages.SumTooSmall(step, len(here), self.terms.fewest, sorted(self._expected - here))

    def _tell_others(self, kind: MessageKind, here: frozenset[str], said: Callable[[str, str], tuple[bytes, ...]]) -> Requests:
        """A request for each client that is left: who they are, and what each other one has said to it."""
        names = messages.pack_names(sorted(here))
        tables = {reader: {sender: said(sender, reader) for sender in here - {reader}} for reader in here}
        return {reader: self.terms.write(kind, names, messages.pack_table(table)) for reader, table in tables.items()}

    def _recover(self, name: str, is_right: Callable[[int], bool]) -> int:
        held = self._shares.get(name, {})
        if len(held) < self.terms.threshold:
            silent = sorted(self._expected - self._answered)
            raise messages.SumTooSmall(_STEPS[MessageKind.REVEALED], len(held), self.terms.threshold, silent)
        secret, wrong = shares.recover(held, self.terms.threshold, is_right)
        for place in wrong:
            holder = self.terms.clients[place - 1]
            reason = f"Unmasking: {holder!r} revealed a wrong share of a secret of {name!r}."
            self.faults[holder] = messages.WrongShare(reason, [holder])
        if secret is None:
            raise self._lost("Unmasking: the shares of a secret of {} do not fit together. Try again without.", [name])
        return secret

    def _lost(self, reason: str, dealers: list[str]) -> messages.LostSecret:
        """The error that names these dealers; in `faults` too, so that who tries again knows whom to leave out."""
        error = messages.LostSecret(reason.format(", ".join(map(repr, sorted(dealers)))), sorted(dealers))
        self.faults.update(dict.fromkeys(dealers, error))
        return error

    def _is_seed(self, name: str, secret: int) -> bool:
        if secret >> (8 * masks.SEED_BYTES):
            return False
        seed = secret.to_bytes(masks.SEED_BYTES, "big")
        return hmac.compare_digest(masks.commitment(self.terms, name, seed), self._commitments[name])

    def _is_key(self, name: str, secret: int) -> bool:
        try:
            return masks.public_of(masks.private_from(secret)) == self._keys[name][1]
        except messages.MalformedMessage:
            return False
