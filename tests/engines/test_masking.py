"""Masked sums: exact whoever leaves, uniform to the eye of the server, and refused by name when anything is wrong."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")
from equipoise.engines.flower.secure import masks, shares
from equipoise.engines.flower.secure.masking_client import MaskingClient
from equipoise.engines.flower.secure.masking_server import MaskingServer
from equipoise.engines.flower.secure.sum_messages import (
    DuplicateMessage,
    LostSecret,
    MalformedMessage,
    MaskingError,
    MessageKind,
    NoReply,
    OutOfOrder,
    RefusedMessage,
    RefusedTerms,
    RefusedToReveal,
    SumTooSmall,
    UnknownSender,
    UnreadableShares,
    WrongShare,
    WrongSum,
    pack,
    pack_names,
    pack_table,
    read_kind,
    unpack,
    unpack_table,
    write_sum_message,
)
from equipoise.engines.flower.secure.sum_terms import SumTerms
from equipoise.errors import EquipoiseError, InvalidParameter
from equipoise.privacy.secure_sum import SimulatedSecureSum

MODULI = [2, 3, 8, 1000, 2**32, 2**48, 3**39, 2**62 - 57, 2**62]
STEPS = [MessageKind.KEYS, MessageKind.SHARES, MessageKind.MASKED, MessageKind.REVEALED]
IMPROBABLE = 1e-7  # of a chi-square that is this unlikely, we say that it is not uniform


def made_terms(count=5, *, length=6, modulus=2**48, purpose="updates", round_index=3, threshold=None, fewest=None):
    """Terms of a sum over `count` clients; without a threshold, or fewest clients, two thirds of them."""
    names = tuple(sorted(f"node {number}" for number in range(count)))
    threshold = threshold or max(2, -(-2 * count // 3))
    return SumTerms("run 1", round_index, purpose, names, length, modulus, threshold, fewest or threshold)


def made_values(terms, seed=0):
    draw = np.random.default_rng(seed)
    return {name: draw.integers(-(2**62), 2**62, terms.length) for name in terms.clients}


def plain_sum(values, names, modulus):
    """By Python's integers: the representative of the sum in [−M/2, M/2)."""
    total = [sum(column) for column in zip(*(map(int, values[name]) for name in names), strict=True)]
    half = modulus // 2
    return [(number + half) % modulus - half for number in total]


class Federation:
    """A server and its clients in one process; a client's state is written down and read again between any two messages."""

    def __init__(self, terms, values=None, *, leaves=None, change=None, change_request=None):
        self.server, self.values = MaskingServer(terms), values if values is not None else made_values(terms)
        self.leaves, self.change, self.change_request = leaves or {}, change, change_request
        self.states, self.sent, self.refused = {}, {}, {}

    def reply(self, name, request):
        if read_kind(request) == MessageKind.INVITATION:
            client = MaskingClient(request, name)
            answer = client.keys()
        else:
            client = MaskingClient.load(self.states[name])
            answer = client.answer(request, self.values[name])
        self.states[name] = client.save()
        return answer

    def send(self, requests):
        answers = {}
        for name, request in requests.items():
            kind = MessageKind(read_kind(request) + 1)
            if self.leaves.get(name) == kind:
                continue
            asked = self.change_request(name, request) if self.change_request else request
            try:
                answers[name] = self.reply(name, asked)
            except EquipoiseError as error:
                self.refused[name] = error
                continue
            self.sent[name, kind] = answers[name]
            if self.change:
                answers[name] = self.change(name, kind, answers[name])
        return answers

    def until(self, kind):
        """Requests of this kind, all before it answered."""
        requests = self.server.start()
        while read_kind(next(iter(requests.values()))) != kind:
            requests = self.server.advance(self.send(requests))
        return requests

    def run(self):
        requests = self.server.start()
        while requests:
            requests = self.server.advance(self.send(requests))
        return self.server


def check_sum(server, values, names):
    assert server.survivors == tuple(sorted(names))
    assert server.total.dtype == np.int64
    assert server.total.tolist() == plain_sum(values, names, server.terms.modulus)


# ---------------------------------------------------------------------------------------------------------------------- shares


def test_shares_are_values_of_the_polynomial(monkeypatch):
    drawn = iter([7, 11])
    monkeypatch.setattr(shares.secrets, "randbelow", lambda bound: next(drawn))
    assert shares.split(5, 3, (1, 2, 10)) == [5 + 7 + 11, 5 + 14 + 44, 5 + 70 + 1100]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 7), st.integers(0, 5), st.integers(0, shares.PRIME - 1), st.randoms(use_true_random=False))
def test_any_threshold_of_shares_gives_the_secret(threshold, spare, secret, random):
    places = tuple(sorted(random.sample(range(1, 300), threshold + spare)))
    dealt = dict(zip(places, shares.split(secret, threshold, places), strict=True))
    chosen = random.sample(places, threshold)
    assert shares.combine({place: dealt[place] for place in chosen}) == secret
    slow = sum(dealt[x] * lagrange_at_zero(x, chosen) for x in chosen) % shares.PRIME
    assert slow == secret
    fewer = {place: dealt[place] for place in chosen[1:]}
    assert shares.combine(fewer) != secret  # of a polynomial of lower degree: 2^−521 to be the same


def lagrange_at_zero(place, places):
    """Exact fractions first, the field last: another road than the code's."""
    weight = Fraction(1)
    for other in places:
        if other != place:
            weight *= Fraction(-other, place - other)
    return weight.numerator * pow(weight.denominator, -1, shares.PRIME)


@pytest.mark.parametrize("secret", [0, 1, shares.PRIME - 1])
def test_fewer_shares_say_nothing(secret):
    pairs = np.array([[part % 4 for part in shares.split(secret, 3, (1, 2, 3))[:2]] for _ in range(3000)])
    assert_uniform(pairs[:, 0] * 4 + pairs[:, 1], 16)


def test_a_wrong_share_is_found_and_named():
    places = (1, 2, 3, 4, 5)
    for liar in places:
        dealt = dict(zip(places, shares.split(1234, 4, places), strict=True))
        dealt[liar] += 1
        secret, wrong = shares.recover(dealt, 4, lambda found: found == 1234)
        assert secret == 1234
        assert wrong <= {liar}
        assert wrong or liar == 5  # the first four were right, and the fifth was not looked at
    dealt = dict(zip(places, shares.split(1234, 4, places), strict=True))
    dealt[1] += 1
    dealt[3] += 1
    assert shares.recover(dealt, 4, lambda found: found == 1234) == (None, frozenset())
    assert shares.recover({1: 5}, 2, lambda found: True) == (None, frozenset())


# ----------------------------------------------------------------------------------------------------------------------- masks


def slow_hkdf(key, info):
    """RFC 5869 for 32 bytes: extract, then one block of expand."""
    pseudo = hmac.new(bytes(32), key, hashlib.sha256).digest()
    return hmac.new(pseudo, info + b"\x01", hashlib.sha256).digest()


def slow_chacha(key, blocks):
    """RFC 8439, section 2.3, with a nonce of zeros and the counter from zero."""

    def turn(x, y):
        return ((x << y) | (x >> (32 - y))) & 0xFFFFFFFF

    out = b""
    for counter in range(blocks):
        start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), counter, 0, 0, 0]
        s = list(start)
        for _ in range(10):
            for a, b, c, d in [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
                               (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]:  # fmt: skip
                for first, second, last, bits in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)]:
                    s[first] = (s[first] + s[second]) & 0xFFFFFFFF
                    s[last] = turn(s[last] ^ s[first], bits)
        out += struct.pack("<16I", *((x + y) & 0xFFFFFFFF for x, y in zip(s, start, strict=True)))
    return out


@pytest.mark.parametrize("modulus", [*MODULI, 3 * 2**60, 2**61 + 1])
def test_masks_are_the_residues_of_chacha_under_hkdf(modulus):
    key, info = secrets.token_bytes(32), b"what for"
    derived = masks.derive(key, info)
    assert derived == slow_hkdf(key, info)
    words = struct.unpack("<64Q", slow_chacha(derived, 8))
    limit = 2**64 // modulus * modulus
    expected = [word % modulus for word in words if word < limit]
    assert masks.mask_words(derived, 30, modulus).tolist() == expected[:30]
    assert masks.mask_words(derived, 0, modulus).tolist() == []


def test_the_stream_does_not_depend_on_how_much_of_it_is_drawn():
    key = secrets.token_bytes(32)
    long = masks.mask_words(key, 5000, 2**62 - 57)
    for count in (1, 17, 4999):
        assert masks.mask_words(key, count, 2**62 - 57).tolist() == long[:count].tolist()


def uniformity(cells, count):
    """The p-value of a chi-square test that these numbers in 0 … count − 1 are uniform."""
    from scipy.stats import chisquare

    return float(chisquare(np.bincount(np.asarray(cells, dtype=np.int64), minlength=count)).pvalue)


def assert_uniform(cells, count):
    assert uniformity(cells, count) > IMPROBABLE


def test_residues_are_not_biased_by_the_remainder():
    modulus = 3 * 2**60  # 2^64 is five times it and a third: a plain remainder is in the first third 6 times in 16
    words = masks.mask_words(secrets.token_bytes(32), 30_000, modulus)
    assert_uniform(words >> np.uint64(60), 3)
    plain = masks.mask_words(secrets.token_bytes(32), 30_000, 2**62) * np.uint64(4) % np.uint64(modulus)
    assert uniformity(plain >> np.uint64(60), 3) < IMPROBABLE


@pytest.mark.parametrize("modulus", MODULI)
def test_residues_travel_and_come_back(modulus):
    words = masks.mask_words(secrets.token_bytes(32), 50, modulus)
    words[:2] = 0, modulus - 1
    data = masks.write_residues(words, modulus)
    assert len(data) == 50 * max(1, -(-(modulus - 1).bit_length() // 8))
    assert masks.read_residues(data, 50, modulus).tolist() == words.tolist()
    for bad in (data[:-1], data + b"\0", b""):
        with pytest.raises(MalformedMessage, match="bytes"):
            masks.read_residues(bad, 50, modulus)


def test_numbers_that_are_no_residues_are_refused():
    with pytest.raises(MalformedMessage, match="residue"):
        masks.read_residues(b"\xe8\x03", 1, 1000)
    assert masks.read_residues(b"\xe7\x03", 1, 1000).tolist() == [999]


def test_letters_open_for_their_reader_only():
    key = secrets.token_bytes(32)
    sealed = masks.seal(key, b"a secret", b"round 1")
    assert masks.unseal(key, sealed, b"round 1") == b"a secret"
    assert b"secret" not in sealed
    changed = [sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :] for place in range(len(sealed))]
    for bad in [*changed, sealed[:-1], b"", sealed[:12]]:
        with pytest.raises(UnreadableShares):
            masks.unseal(key, bad, b"round 1")
    with pytest.raises(UnreadableShares):
        masks.unseal(key, sealed, b"round 2")
    with pytest.raises(UnreadableShares):
        masks.unseal(secrets.token_bytes(32), sealed, b"round 1")


def test_two_clients_agree_on_a_key():
    one, other = masks.new_key(), masks.new_key()
    agreed = masks.agreed_key(one, masks.public_of(other))
    assert agreed == masks.agreed_key(other, masks.public_of(one))
    assert agreed != masks.agreed_key(one, masks.public_of(masks.new_key()))
    assert masks.public_of(masks.private_from(masks.secret_of(one))) == masks.public_of(one)


@pytest.mark.parametrize("bad", [b"", b"\x02" + b"\xff" * 48, b"\x05" * 49, bytes(49), b"\x02" * 48, b"\x04" + bytes(96)])
def test_keys_that_are_no_points_are_refused(bad):
    with pytest.raises(MalformedMessage):
        masks.read_public(bad)


def test_points_off_the_curve_are_refused():
    prime = 2**384 - 2**128 - 2**96 + 2**32 - 1
    constant = int("b3312fa7e23ee7e4988e056be3f82d19181d9c6efe8141120314088f5013875ac656398d8a2ed19d2a85c8edd3ec2aef", 16)
    refused = 0
    for x in range(20):  # y² = x³ − 3x + b has a solution if the right side is a square: Euler's criterion
        data = b"\x02" + x.to_bytes(48, "big")
        if pow(x**3 - 3 * x + constant, (prime - 1) // 2, prime) == 1:
            masks.read_public(data)
        else:
            refused += 1
            with pytest.raises(MalformedMessage, match="curve"):
                masks.read_public(data)
    assert refused > 3


# ------------------------------------------------------------------------------------------------------------------- exact sums


@pytest.mark.parametrize("modulus", MODULI)
@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_sum_is_exact(count, modulus):
    terms = made_terms(count, modulus=modulus)
    federation = Federation(terms)
    server = federation.run()
    check_sum(server, federation.values, terms.clients)
    assert server.faults == {}
    rows = torch.tensor(np.stack([federation.values[name] for name in terms.clients]))
    assert server.total.tolist() == SimulatedSecureSum(modulus).sum(rows).tolist()


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_clients_may_leave_at_each_step_down_to_the_threshold(step, lost):
    terms = made_terms(5, modulus=1001, threshold=3, fewest=3)
    gone = terms.clients[1 : 1 + lost]
    federation = Federation(terms, leaves=dict.fromkeys(gone, step))
    if lost == 3:
        with pytest.raises(SumTooSmall) as caught:
            federation.run()
        assert (caught.value.have, caught.value.need) == (2, 3)
        assert set(caught.value.clients) == set(gone)
        with pytest.raises(OutOfOrder):
            _ = federation.server.total
        return
    server = federation.run()
    alive = terms.clients if step == MessageKind.REVEALED else [name for name in terms.clients if name not in gone]
    check_sum(server, federation.values, alive)
    assert {name: type(error) for name, error in server.faults.items()} == dict.fromkeys(gone, NoReply)


def test_late_answers_count_while_the_step_is_open():
    terms = made_terms(4, threshold=3)
    federation = Federation(terms)
    answers = federation.send(federation.until(MessageKind.SURVIVORS))
    late = {name: answers.pop(name) for name in terms.clients[:2]}
    with pytest.raises(SumTooSmall):
        federation.server.advance(answers)
    assert set(federation.server.faults) == set(late)
    assert federation.server.advance({terms.clients[0]: late[terms.clients[0]]}) == {}
    check_sum(federation.server, federation.values, terms.clients)
    assert set(federation.server.faults) == {terms.clients[1]}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_pattern_of_leaving(data):
    count = data.draw(st.integers(2, 6))
    threshold = data.draw(st.integers(max(2, count // 2 + 1), count))
    fewest = data.draw(st.integers(threshold, count))
    modulus = data.draw(st.sampled_from(MODULI) | st.integers(2, 2**62))
    terms = made_terms(count, length=3, modulus=modulus, threshold=threshold, fewest=fewest)
    leaves = {name: data.draw(st.sampled_from([None, None, *STEPS])) for name in terms.clients}
    federation = Federation(terms, leaves=leaves)
    alive = [name for name in terms.clients if leaves[name] in (None, MessageKind.REVEALED)]
    helpers = [name for name in alive if leaves[name] is None]
    if len(alive) >= fewest and len(helpers) >= threshold:
        check_sum(federation.run(), federation.values, alive)
    else:
        with pytest.raises(SumTooSmall):
            federation.run()


# -------------------------------------------------------------------------------------------------- what the server gets to see


def masked_vectors(terms, values):
    federation = Federation(terms, values)
    answers = federation.send(federation.until(MessageKind.INBOX))
    found = {name: terms.read(message, MessageKind.MASKED, 3)[1] for name, message in answers.items()}
    return federation, {name: masks.read_residues(data, terms.length, terms.modulus) for name, data in found.items()}


@pytest.mark.parametrize("modulus", [8, 11, 2**48, 3**39])
def test_what_one_node_sends_is_uniform_whatever_its_values(modulus):
    terms = made_terms(3, length=20_000, modulus=modulus)
    cells = min(modulus, 16)
    for value in (0, 1, -(2**40)):
        values = {name: np.full(terms.length, value) for name in terms.clients}
        _, found = masked_vectors(terms, values)
        for words in found.values():
            assert_uniform(words.astype(object) * cells // modulus, cells)
    plain = (values[terms.clients[0]] % modulus).astype(object) * cells // modulus
    assert uniformity(plain, cells) < IMPROBABLE  # without masks the same test says no


def test_what_one_node_sends_does_not_follow_its_values():
    terms = made_terms(3, length=24_000, modulus=6)
    pattern = np.tile(np.arange(6), 4000)
    _, found = masked_vectors(terms, dict.fromkeys(terms.clients, pattern))
    for words in found.values():
        assert_uniform(words.astype(np.int64) * 6 + pattern, 36)  # jointly: each masked value with each true one
    one, other = (found[name].astype(np.int64) for name in terms.clients[:2])
    assert_uniform(one * 6 + other, 36)


def test_neighbouring_words_of_a_mask_are_independent():
    terms = made_terms(2, length=24_000, modulus=6)
    _, found = masked_vectors(terms, {name: np.zeros(terms.length, np.int64) for name in terms.clients})
    words = found[terms.clients[0]].astype(np.int64)
    assert_uniform(words[::2] * 6 + words[1::2], 36)


def seeds_revealed(federation, requests):
    """What the server can put together of b, from the survivors' answers."""
    terms, gathered = federation.server.terms, {}
    for name, message in federation.send(requests).items():
        _, seeds, _ = terms.read(message, MessageKind.REVEALED, 3)
        for owner, (part,) in unpack_table(seeds, (shares.SHARE_BYTES,)).items():
            gathered.setdefault(owner, {})[terms.place[name]] = int.from_bytes(part, "big")
    return {
        owner: shares.combine(dict(list(parts.items())[: terms.threshold])).to_bytes(32, "big")
        for owner, parts in gathered.items()
    }


def test_one_node_stays_hidden_after_its_own_mask_is_removed():
    terms = made_terms(3, length=20_000, modulus=8)
    zeros = {name: np.zeros(terms.length, np.int64) for name in terms.clients}
    federation, found = masked_vectors(terms, zeros)
    requests = federation.server.advance(
        {name: federation.sent[name, MessageKind.MASKED] for name in terms.clients}
    )  # fmt: skip
    total = np.zeros(terms.length, np.uint64)
    for name, seed in seeds_revealed(federation, requests).items():
        rest = found[name].copy()
        masks.add_mask(rest, masks.self_mask(terms, name, seed), 8, sign=-1)
        assert_uniform(rest, 8)
        masks.add_mask(total, rest, 8)
    assert not total.any()  # these were the right seeds: what is left cancels


def test_a_late_answer_stays_hidden_although_the_key_was_given_up():
    terms = made_terms(4, length=20_000, modulus=8)
    zeros = {name: np.zeros(terms.length, np.int64) for name in terms.clients}
    federation, found = masked_vectors(terms, zeros)
    late, *others = terms.clients
    requests = federation.server.advance({name: federation.sent[name, MessageKind.MASKED] for name in others})
    parts = {}
    for name, message in federation.send(requests).items():
        keys = unpack_table(terms.read(message, MessageKind.REVEALED, 3)[2], (shares.SHARE_BYTES,))
        parts[terms.place[name]] = int.from_bytes(keys[late][0], "big")
    key = masks.private_from(shares.combine(dict(list(parts.items())[: terms.threshold])))
    rest = found[late].copy()
    for name in others:
        agreed = masks.agreed_key(key, terms.read(federation.sent[name, MessageKind.KEYS], MessageKind.KEYS, 3)[2])
        words = masks.pair_mask(terms, late, name, agreed)
        masks.add_mask(rest, words, 8, sign=-masks.pair_sign(late, name))
    assert_uniform(rest, 8)
    with pytest.raises(UnknownSender):
        federation.server.receive(late, federation.sent[late, MessageKind.MASKED])


def test_masks_are_never_used_twice():
    terms = made_terms(3, length=1000)
    values = made_values(terms)
    again = [masked_vectors(other, values)[1] for other in (terms, terms, made_terms(3, length=1000))]
    for name in terms.clients:
        for first, second in combinations(again, 2):
            assert int((first[name] == second[name]).sum()) == 0  # 2^−48 for each of 1000 words


def test_masks_of_one_key_differ_between_sums_and_owners():
    first, second = made_terms(3), made_terms(3, purpose="losses")
    key, a, b, c = bytes(32), *first.clients
    found = [
        *(masks.self_mask(terms, name, key) for terms in (first, second) for name in (a, b)),
        *(masks.pair_mask(terms, a, name, key) for terms in (first, second) for name in (b, c)),
    ]
    assert len({tuple(words.tolist()) for words in found}) == 8
    assert masks.pair_mask(first, a, b, key).tolist() == masks.pair_mask(first, b, a, key).tolist()


def test_the_server_keeps_no_clients_vector():
    terms = made_terms(3, length=500)
    federation, found = masked_vectors(terms, made_values(terms))
    federation.server.advance({name: federation.sent[name, MessageKind.MASKED] for name in terms.clients})
    kept = [value for value in vars(federation.server).values() if isinstance(value, np.ndarray)]
    assert len(kept) == 1
    assert all(kept[0].tolist() != words.tolist() for words in found.values())


# ----------------------------------------------------------------------------------------------------------------- bad messages


def other_round(name, kind, message):
    """The same step's answer in a sum that differs in its round alone."""
    terms = made_terms(4, threshold=2 + 1, round_index=4)
    federation = Federation(terms)
    federation.run()
    return federation.sent[name, kind]


BAD_ANSWERS = {
    "nothing": (lambda name, kind, message: b"", MalformedMessage),
    "garbage": (lambda name, kind, message: b"\x93NUMPY" * 20, MalformedMessage),
    "not bytes": (lambda name, kind, message: "text", MalformedMessage),
    "cut short": (lambda name, kind, message: message[:-1], MalformedMessage),
    "cut in its head": (lambda name, kind, message: message[:10], MalformedMessage),
    "too long": (lambda name, kind, message: message + b"\0\0\0\0", MalformedMessage),
    "huge": (lambda name, kind, message: message + bytes(10**6), MalformedMessage),
    "huge length": (lambda name, kind, message: message[:21] + b"\xff" * 4 + message[25:], MalformedMessage),
    "no such kind": (lambda name, kind, message: message[:4] + b"\x63" + message[5:], MalformedMessage),
    "another step's": (lambda name, kind, message: message[:4] + bytes([kind % 8 + 1]) + message[5:], OutOfOrder),
    "another round's": (other_round, WrongSum),
    "another's name": (
        lambda name, kind, message: write_sum_message(kind, message[5:21], [b"node 3", *unpack(message[21:])[1:]]),
        UnknownSender,
    ),
    "parts lost": (
        lambda name, kind, message: write_sum_message(kind, message[5:21], unpack(message[21:])[:2]),
        MalformedMessage,
    ),
    "parts empty": (
        lambda name, kind, message: write_sum_message(kind, message[5:21], [name.encode(), b"", b""]),
        MalformedMessage,
    ),
    "name not text": (
        lambda name, kind, message: write_sum_message(kind, message[5:21], [b"\xff", *unpack(message[21:])[1:]]),
        UnknownSender,
    ),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("how", BAD_ANSWERS)
def test_a_bad_answer_is_refused_by_name_and_the_rest_is_summed(how, step):
    spoil, error = BAD_ANSWERS[how]
    terms = made_terms(4, threshold=3, modulus=2**40)
    federation = Federation(
        terms, change=lambda name, kind, message: spoil(name, kind, message) if (name, kind) == ("node 1", step) else message
    )
    server = federation.run()
    assert list(server.faults) == ["node 1"]
    assert type(server.faults["node 1"]) is error
    assert server.faults["node 1"].clients == ("node 1",)
    assert "node 1" in str(server.faults["node 1"])
    check_sum(server, federation.values, terms.clients if step == MessageKind.REVEALED else ["node 0", "node 2", "node 3"])


def with_parts(message, change):
    """A message with its parts changed."""
    return message[:21] + pack(change(*unpack(message[21:])))


@pytest.mark.parametrize(
    ("step", "change"),
    [
        (MessageKind.KEYS, lambda me, first, second: [me, first, second[:-1]]),
        (MessageKind.KEYS, lambda me, first, second: [me, first, b"\x09" + second[1:]]),
        (MessageKind.SHARES, lambda me, fixed, table: [me, fixed[:-1], table]),
        (MessageKind.SHARES, lambda me, fixed, table: [me, fixed, pack(unpack(table)[:-2])]),
        (MessageKind.SHARES, lambda me, fixed, table: [me, fixed, pack([*unpack(table)[:-2], b"stranger", bytes(160)])]),
        (MessageKind.SHARES, lambda me, fixed, table: [me, fixed, pack([*unpack(table), *unpack(table)[-2:]])]),
        (MessageKind.SHARES, lambda me, fixed, table: [me, fixed, pack([*unpack(table)[:-1], bytes(159)])]),
        (MessageKind.MASKED, lambda me, data, closed: [me, data[:-6], closed]),
        (MessageKind.MASKED, lambda me, data, closed: [me, b"\xff" * len(data), closed]),
        (MessageKind.MASKED, lambda me, data, closed: [me, data, pack([b"stranger"])]),
        (MessageKind.MASKED, lambda me, data, closed: [me, data, pack([b"node 2", b"node 2"])]),
        (MessageKind.REVEALED, lambda me, seeds, keys: [me, seeds, seeds]),
        (MessageKind.REVEALED, lambda me, seeds, keys: [me, keys, seeds]),
        (MessageKind.REVEALED, lambda me, seeds, keys: [me, pack(unpack(seeds)[:-2]), keys]),
        (MessageKind.REVEALED, lambda me, seeds, keys: [me, pack([*unpack(seeds)[:-1], b"\xff" * 66]), keys]),
    ],
)
def test_parts_that_do_not_fit_are_refused(step, change):
    terms = made_terms(4, threshold=3, modulus=3**25)
    spoil = {("node 1", step): change}
    federation = Federation(
        terms, change=lambda name, kind, data: with_parts(data, spoil[name, kind]) if (name, kind) in spoil else data
    )
    server = federation.run()
    assert type(server.faults["node 1"]) is MalformedMessage
    check_sum(server, federation.values, terms.clients if step == MessageKind.REVEALED else ["node 0", "node 2", "node 3"])


def test_second_answers_and_strangers_are_refused():
    terms = made_terms(3)
    federation = Federation(terms)
    with pytest.raises(OutOfOrder):
        federation.server.receive("node 0", b"")
    with pytest.raises(OutOfOrder):
        federation.server.advance({})
    answers = federation.send(federation.server.start())
    with pytest.raises(OutOfOrder):
        federation.server.start()
    federation.server.receive("node 0", answers["node 0"])
    with pytest.raises(DuplicateMessage) as caught:
        federation.server.receive("node 0", answers["node 0"])
    assert isinstance(caught.value, RefusedMessage)
    with pytest.raises(UnknownSender):
        federation.server.receive("stranger", answers["node 1"])
    requests = federation.server.advance({"node 1": answers["node 1"], "node 2": answers["node 2"], "stranger": b"x"})
    while requests:
        requests = federation.server.advance(federation.send(requests))
    check_sum(federation.server, federation.values, terms.clients)
    assert list(federation.server.faults) == ["stranger"]
    with pytest.raises(OutOfOrder):
        federation.server.receive("node 0", answers["node 0"])


def spoil_letters(message, readers):
    """A SHARES message in which the letters to these readers have one bit changed."""

    def change(me, fixed, table):
        rows = unpack_table(table, (160,))
        return [
            me,
            fixed,
            pack_table(
                {name: (bytes([row[0][0] ^ 1]) + row[0][1:] if name in readers else row[0],) for name, row in rows.items()}
            ),
        ]

    return with_parts(message, change)


@pytest.mark.parametrize("leaves", [{}, {"node 1": MessageKind.MASKED}])
def test_one_letter_that_does_not_open_costs_nothing(leaves):
    terms = made_terms(5, threshold=3)
    federation = Federation(
        terms,
        leaves=leaves,
        change=lambda name, kind, data: (
            spoil_letters(data, {"node 3"}) if (name, kind) == ("node 1", MessageKind.SHARES) else data
        ),
    )
    server = federation.run()
    check_sum(server, federation.values, [name for name in terms.clients if name not in leaves])
    assert federation.refused == {}


@pytest.mark.parametrize("leaves", [{}, {"node 1": MessageKind.MASKED}])
def test_a_dealer_whose_letters_do_not_open_is_named(leaves):
    terms = made_terms(4, threshold=3)
    federation = Federation(
        terms,
        leaves=leaves,
        change=lambda name, kind, data: (
            spoil_letters(data, terms.clients) if (name, kind) == ("node 1", MessageKind.SHARES) else data
        ),
    )
    with pytest.raises(LostSecret) as caught:
        federation.run()
    assert caught.value.clients == ("node 1",)
    assert type(federation.server.faults["node 1"]) is LostSecret


def wrong_share(message, owner):
    def change(me, seeds, keys):
        tables = []
        for table in (seeds, keys):
            rows = unpack_table(table, (66,))
            if owner in rows:
                rows[owner] = (b"\0" + rows[owner][0][1:-1] + bytes([rows[owner][0][-1] ^ 1]),)
            tables.append(pack_table(rows))
        return [me, *tables]

    return with_parts(message, change)


@pytest.mark.parametrize("leaves", [{}, {"node 4": MessageKind.MASKED}])
def test_a_wrong_share_is_noticed_and_its_holder_named(leaves):
    terms = made_terms(5, threshold=3)
    federation = Federation(
        terms,
        leaves=leaves,
        change=lambda name, kind, data: (
            wrong_share(data, "node 4") if (name, kind) == ("node 0", MessageKind.REVEALED) else data
        ),
    )
    server = federation.run()
    check_sum(server, federation.values, [name for name in terms.clients if name not in leaves])
    assert type(server.faults["node 0"]) is WrongShare


def test_wrong_shares_without_one_to_spare_end_the_sum():
    terms = made_terms(3, threshold=3)
    federation = Federation(
        terms,
        change=lambda name, kind, data: (
            wrong_share(data, "node 2") if (name, kind) == ("node 0", MessageKind.REVEALED) else data
        ),
    )
    with pytest.raises(LostSecret) as caught:
        federation.run()
    assert caught.value.clients == ("node 2",)
    assert list(federation.server.faults) == ["node 2"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_whatever_bytes_arrive_only_named_errors_leave(data):
    """One message, to the server or to a client, has bytes changed, cut out or put in."""
    terms = made_terms(3, length=2, threshold=2)
    target = (data.draw(st.sampled_from(terms.clients)), data.draw(st.sampled_from(list(MessageKind))))

    def spoil(name, kind, message):
        if (name, kind) != target:
            return message
        start = data.draw(st.integers(0, len(message)))
        stop = data.draw(st.integers(start, min(len(message), start + 8)))
        return message[:start] + data.draw(st.binary(max_size=12)) + message[stop:]

    federation = Federation(terms, change=spoil, change_request=lambda name, request: spoil(name, read_kind(request), request))
    try:
        server = federation.run()
    except MaskingError:
        return
    assert all(isinstance(error, MaskingError) for error in [*server.faults.values(), *federation.refused.values()])
    # A changed masked vector is a changed vector, and a roster with another valid key of a neighbour gives masks that do not
    # cancel: nothing can tell, and the protocol assumes that public keys are delivered as they are.
    if target[1] not in (MessageKind.MASKED, MessageKind.ROSTER):
        check_sum(server, federation.values, server.survivors)


# ---------------------------------------------------------------------------------------------------------- what clients refuse


@pytest.fixture
def waiting():
    """A client that has sent its values, and the terms; five dealt shares."""
    terms = made_terms(5, threshold=3, fewest=4)
    federation = Federation(terms)
    federation.send(federation.until(MessageKind.INBOX))
    return MaskingClient.load(federation.states["node 0"]), terms


def survivors(terms, alive, gone):
    return write_sum_message(MessageKind.SURVIVORS, terms.tag, [pack_names(alive), pack_names(gone)])


@pytest.mark.parametrize(
    ("alive", "gone", "why"),
    [
        ("01234", "4", "Both shares"),
        ("0123", "34", "Both shares"),
        ("0123", "", "all of them"),
        ("0123", "45", "all of them"),
        ("1234", "0", "said to have left"),
        ("012", "34", "says too much"),
    ],
)
def test_a_client_keeps_shares_that_would_say_more_than_the_sum(waiting, alive, gone, why):
    client, terms = waiting
    with pytest.raises(RefusedToReveal, match=why):
        client.reveal(survivors(terms, [f"node {n}" for n in alive], [f"node {n}" for n in gone]))
    assert client.awaits == MessageKind.SURVIVORS  # the right request is still answered
    client.reveal(survivors(terms, [f"node {n}" for n in "0123"], ["node 4"]))


def test_a_client_never_gives_both_shares_of_a_peer(waiting):
    client, terms = waiting
    answer = client.reveal(survivors(terms, [f"node {n}" for n in "0123"], ["node 4"]))
    _, seeds, keys = terms.read(answer, MessageKind.REVEALED, 3)
    assert set(unpack_table(seeds, (66,))) == {f"node {n}" for n in "0123"}
    assert set(unpack_table(keys, (66,))) == {"node 4"}
    for again in ("0123", "4"), ("01234", ""):
        with pytest.raises(OutOfOrder, match="once"):
            client.reveal(survivors(terms, [f"node {n}" for n in again[0]], [f"node {n}" for n in again[1]]))
        with pytest.raises(OutOfOrder):
            MaskingClient.load(client.save()).reveal(survivors(terms, list(terms.clients), []))


def test_a_client_masks_once_and_in_order():
    terms = made_terms(3)
    federation = Federation(terms)
    requests = federation.server.start()
    client = MaskingClient(requests["node 0"], "node 0")
    assert client.awaits == MessageKind.ROSTER
    for kind in (MessageKind.INBOX, MessageKind.SURVIVORS):
        with pytest.raises(OutOfOrder):
            client.answer(write_sum_message(kind, terms.tag, [b"", b""]), federation.values["node 0"])
    other = Federation(terms)
    asked = other.until(MessageKind.INBOX)["node 0"]
    client = MaskingClient.load(other.states["node 0"])
    assert client.awaits == MessageKind.INBOX
    with pytest.raises(OutOfOrder):
        client.share(asked)
    client.mask(asked, other.values["node 0"])
    for values in other.values["node 0"], other.values["node 1"]:
        with pytest.raises(OutOfOrder, match="once"):
            client.mask(asked, values)
    with pytest.raises(OutOfOrder):
        client.keys()
    state = client.save()  # nothing is left in it to mask with
    assert MaskingClient.load(state)._seed == b""
    loaded = MaskingClient.load(state)
    assert (loaded._sealing, loaded._masking) == (None, None)


@pytest.mark.parametrize(
    "values",
    [None, 3, np.zeros(5, np.int64), np.zeros((6, 1), np.int64), np.zeros(6), np.zeros(6, np.int32), ["a"] * 6],
)
def test_values_must_be_whole_numbers_of_the_agreed_length(values):
    terms = made_terms(3)
    federation = Federation(terms)
    asked = federation.until(MessageKind.INBOX)["node 0"]
    client = MaskingClient.load(federation.states["node 0"])
    with pytest.raises(InvalidParameter, match="values must be int64 of shape"):
        client.mask(asked, values)
    assert client.awaits == MessageKind.INBOX
    client.mask(asked, torch.zeros(6, dtype=torch.int64))  # a tensor is as good as an array


@pytest.mark.parametrize("kind", [MessageKind.ROSTER, MessageKind.INBOX, MessageKind.SURVIVORS])
def test_requests_of_another_round_are_refused(kind):
    federation, other = Federation(made_terms(3)), Federation(made_terms(3, round_index=4))
    federation.until(kind)
    replay = other.until(kind)["node 0"]
    client = MaskingClient.load(federation.states["node 0"])
    with pytest.raises(WrongSum, match="round 4"):
        client.answer(replay, federation.values["node 0"])


def test_letters_of_another_sum_do_not_open():
    """Moved by hand into this sum's messages: the same names and step, other keys and terms."""
    terms = made_terms(4, threshold=3)
    other = Federation(made_terms(4, threshold=3, round_index=4))
    other.run()
    moved = unpack(other.sent["node 1", MessageKind.SHARES][21:])[2]
    federation = Federation(
        terms,
        change=lambda name, kind, data: (
            with_parts(data, lambda me, fixed, table: [me, fixed, moved])
            if (name, kind) == ("node 1", MessageKind.SHARES)
            else data
        ),
    )
    with pytest.raises(LostSecret) as caught:
        federation.run()
    assert caught.value.clients == ("node 1",)
    assert type(federation.server.faults["node 1"]) is LostSecret


def test_letters_given_to_the_wrong_reader_do_not_open():
    terms = made_terms(4, threshold=3)

    def swap(me, fixed, table):
        rows = unpack_table(table, (160,))
        return [me, fixed, pack_table({**rows, "node 2": rows["node 3"], "node 3": rows["node 2"]})]

    federation = Federation(
        terms,
        change=lambda name, kind, data: with_parts(data, swap) if (name, kind) == ("node 1", MessageKind.SHARES) else data,
    )
    with pytest.raises(LostSecret) as caught:  # two of four did not open, three are needed
        federation.run()
    assert caught.value.clients == ("node 1",)
    assert type(federation.server.faults["node 1"]) is LostSecret


def test_a_letter_sent_back_to_its_writer_does_not_open():
    """Both directions have one agreed key: what a letter is tied to tells them apart."""
    federation = Federation(made_terms(4, threshold=3))
    asked = federation.until(MessageKind.INBOX)["node 0"]
    own = unpack_table(unpack(federation.sent["node 0", MessageKind.SHARES][21:])[2], (160,))["node 1"]
    back = with_parts(asked, lambda names, table: [names, pack_table({**unpack_table(table, (160,)), "node 1": own})])
    for request, closed in ((asked, []), (back, [b"node 1"])):
        client = MaskingClient.load(federation.states["node 0"])
        answer = client.mask(request, federation.values["node 0"])
        assert unpack(client.terms.read(answer, MessageKind.MASKED, 3)[2]) == closed


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (MessageKind.ROSTER, lambda names, table: [pack(unpack(names)[1:]), table]),
        (MessageKind.ROSTER, lambda names, table: [pack([*unpack(names), b"stranger"]), table]),
        (MessageKind.ROSTER, lambda names, table: [pack(reversed(unpack(names))), table]),
        (MessageKind.ROSTER, lambda names, table: [names, pack(unpack(table)[3:])]),
        (MessageKind.ROSTER, lambda names, table: [names, pack([*unpack(table)[:-1], bytes(49)])]),
        (MessageKind.INBOX, lambda names, table: [names, pack(unpack(table)[2:])]),
        (MessageKind.INBOX, lambda names, table: [pack([*unpack(names), b"stranger"]), table]),
        (MessageKind.INBOX, lambda names, table: [b"\xff", table]),
    ],
)
def test_a_client_refuses_lists_that_do_not_fit(kind, change):
    federation = Federation(made_terms(4, threshold=3))
    asked = federation.until(kind)["node 0"]
    client = MaskingClient.load(federation.states["node 0"])
    with pytest.raises(MalformedMessage):
        client.answer(with_parts(asked, change), federation.values["node 0"])
    assert client.awaits == kind


@pytest.mark.parametrize("kind", [MessageKind.ROSTER, MessageKind.INBOX])
def test_a_client_does_not_go_on_in_too_small_a_crowd(kind):
    federation = Federation(made_terms(4, threshold=3))
    asked = federation.until(kind)["node 0"]
    client = MaskingClient.load(federation.states["node 0"])
    width = 3 if kind == MessageKind.ROSTER else 2
    few = with_parts(asked, lambda names, table: [pack_names(["node 0", "node 1"]), pack(unpack(table)[:width])])
    with pytest.raises(SumTooSmall) as caught:
        client.answer(few, federation.values["node 0"])
    assert (caught.value.have, caught.value.need) == (2, 3)


def test_a_client_takes_part_where_it_is_among_the_clients():
    terms = made_terms(5, threshold=3, fewest=3)
    with pytest.raises(RefusedTerms, match="not among"):
        MaskingClient(terms.invitation, "node 9")
    assert MaskingClient(terms.invitation, "node 1").terms == terms


def test_saved_clients_that_were_changed_are_refused():
    terms = made_terms(3)
    state = MaskingClient(terms.invitation, "node 0").save()
    for bad in (b"", state[:-1], state[1:], state[:40] + bytes([state[40] ^ 1]) + state[41:], None):
        with pytest.raises(MalformedMessage):
            MaskingClient.load(bad)


def test_nothing_secret_is_shown():
    terms = made_terms(3)
    client = MaskingClient(terms.invitation, "node 0")
    assert repr(client) == "MaskingClient(me='node 0', sum='updates' of round 4 in run 'run 1', awaits=ROSTER)"
    assert "Exchange" not in repr(MaskingServer(terms))


# ----------------------------------------------------------------------------------------------------------------------- terms


def test_terms_travel_and_come_back():
    for terms in (made_terms(2), made_terms(9, modulus=3**39), made_terms(4, threshold=4, round_index=0)):
        assert SumTerms.of_invitation(terms.invitation) == terms
        assert SumTerms.decode(terms.encode()).tag == terms.tag


def test_tags_differ_in_anything():
    first = made_terms(4)
    assert len({first.tag, made_terms(4).tag, made_terms(4, purpose="losses").tag, made_terms(4, round_index=4).tag}) == 4


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"count": 1}, "clients"),
        ({"length": 0}, "length"),
        ({"length": 2**40}, "length"),
        ({"length": 2.0}, "length"),
        ({"modulus": 1}, "modulus"),
        ({"modulus": 2**62 + 1}, "modulus"),
        ({"threshold": 2}, "threshold"),  # of five: two halves could be told different things
        ({"threshold": 6}, "threshold"),
        ({"threshold": "3"}, "threshold"),
        ({"fewest": 3}, "fewest"),
        ({"fewest": 6}, "fewest"),
        ({"count": 1001}, "clients"),
        ({"round_index": -1}, "round"),
        ({"purpose": ""}, "purpose"),
        ({"purpose": "x" * 201}, "purpose"),
        ({"purpose": "\ud800"}, "purpose"),
    ],
)
def test_terms_that_cannot_be_are_refused(options, parameter):
    with pytest.raises(InvalidParameter) as caught:
        made_terms(**options)
    assert caught.value.parameter == parameter


def test_names_must_differ():
    with pytest.raises(InvalidParameter, match="different names"):
        SumTerms("a", 0, "b", ("x", "x", "y"), length=1, modulus=2, threshold=2, fewest=2)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.binary(max_size=9), st.integers(0, 9))
def test_changed_invitations_are_refused_by_name(place, put, cut):
    message = made_terms(3).invitation
    place %= len(message) + 1
    changed = message[:place] + put + message[place + cut :]
    if changed == message:
        return
    with pytest.raises(MaskingError):
        MaskingClient(changed, "node 0")


def test_invitations_to_terms_that_cannot_be_are_refused():
    terms = made_terms(5)
    low = terms.encode().replace((4).to_bytes(8, "little") * 2, (2).to_bytes(8, "little") + (4).to_bytes(8, "little"))
    with pytest.raises(MalformedMessage, match="threshold"):
        SumTerms.decode(low)
    with pytest.raises(MalformedMessage, match="too long"):
        SumTerms.decode(bytes(10**7))
