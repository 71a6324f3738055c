import numpy as np
import torch
from scipy import stats

from equipoise.core import rng


def splitmix64(state: int, count: int) -> list[int]:
    """The published generator, in plain integers."""
    mask, out = (1 << 64) - 1, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(z ^ (z >> 31))
    return out


def test_bits_are_splitmix64():
    # 1234567 is the seed of the generator's widely used test vector, whose first output is 6457827717110365317.
    expected = splitmix64(1234567, 5)
    assert expected[0] == 6457827717110365317
    bits = rng.random_bits(torch.tensor([1234567]), 1, 5)[0].tolist()
    assert bits == [b & ((1 << 63) - 1) for b in expected]


def test_tensor_and_integer_hashes_agree():
    numbers = [0, 1, -1, 2**62, -(2**63), 123456789]
    mixed = rng._mix_tensor(torch.tensor(numbers)).tolist()
    assert mixed == [rng.signed(rng._mix(n)) for n in numbers]
    assert rng._mix_array(np.array(numbers).view(np.uint64)).tolist() == [rng._mix(n) for n in numbers]


def test_keys_of_clients_are_the_hash_of_their_names_and_the_stream():
    names, key = [0, 1, -1, 2**62, -(2**63), 123456789], 2**64 - 3
    expected = [rng.signed(rng._mix(rng._mix(n) ^ key)) for n in names]
    assert rng.client_keys(key, torch.tensor(names)).tolist() == expected
    assert rng.client_keys(key, torch.tensor(names[3])).item() == expected[3]  # one client, without a dimension


def test_bits_and_keys_of_a_gpu_are_those_of_the_cpu():
    names = torch.tensor([0, 1, -1, 2**62, -(2**63), 123456789])
    assert torch.equal(rng._keys_by_torch(2**64 - 3, names), rng.client_keys(2**64 - 3, names))
    for first in (0, 7 << 32, torch.arange(6) << 32):
        assert torch.equal(rng._bits_by_torch(names, first, 9), rng.random_bits(names, first, 9))


def test_a_generator_is_philox_under_the_stream_s_key():
    expected = np.random.Generator(np.random.Philox(key=rng.stream_key(5, "cohort", 3)))
    np.testing.assert_array_equal(rng.generator(5, "cohort", 3).random(20), expected.random(20))


def test_streams_differ_by_every_coordinate_and_repeat():
    keys = {
        rng.stream_key(seed, purpose, index)
        for seed in (0, 1, 2**32, 2**63 - 1)
        for purpose in ("batches", "cohort")
        for index in (0, 1, 2)
    }
    assert len(keys) == 24
    a, b = (rng.generator(3, "noise", 2, client="x").random(4) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, rng.generator(3, "noise", 2, client="y").random(4))
    assert rng.torch_generator(1, "init").initial_seed() == rng.torch_generator(1, "init").initial_seed()


def test_bits_look_uniform_and_streams_independent():
    keys = rng.client_keys(rng.stream_key(0, "test"), torch.arange(200))
    bits = rng.random_bits(keys, 0, 500).double() / 2.0**63
    assert stats.kstest(bits.flatten().numpy(), "uniform").pvalue > 0.01
    correlation = np.corrcoef(bits[:, :-1].flatten().numpy(), bits[:, 1:].flatten().numpy())[0, 1]
    assert abs(correlation) < 0.015  # five standard deviations of 100,000 pairs
    neighbours = np.corrcoef(bits[:-1].flatten().numpy(), bits[1:].flatten().numpy())[0, 1]
    assert abs(neighbours) < 0.015


def test_names_have_the_same_key_everywhere():
    # BLAKE2b of the name, by definition and not by Python's salted hash.
    import hashlib

    assert rng.name_key("client-7") == int.from_bytes(hashlib.blake2b(b"client-7", digest_size=8).digest(), "little")


def test_first_uniforms_are_those_of_each_clients_generator():
    names = [f"client {k}" for k in range(300)] + ["", "é", "x" * 1000]
    keys = rng.name_keys(names)
    assert keys.tolist() == [rng.signed(rng.name_key(name)) for name in names]
    for seed in (0, 1, 2**40):
        drawn = rng.first_uniforms(seed, "split clients", keys)
        assert drawn.tolist() == [rng.generator(seed, "split clients", client=name).random() for name in names]


def test_wide_products_have_all_bits():
    values = np.array([0, 1, 2**32 - 1, 2**32, 2**64 - 1, 0x0123456789ABCDEF], dtype=np.uint64)
    for factor in (1, 2**64 - 1, 0xD2E7470EE14C6C93):
        high, low = rng._wide_product(factor, values)
        exact = [factor * int(value) for value in values]
        assert [(int(a) << 64) + int(b) for a, b in zip(high, low, strict=True)] == exact


def test_philox_is_that_of_numpy():
    drawn = np.random.Generator(np.random.Philox(key=7)).bit_generator.random_raw(1)
    assert rng._philox(np.array([7], dtype=np.uint64))[0] == drawn[0]
