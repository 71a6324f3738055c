"""The formula of a round over many workers: hand arithmetic, and what it must say of clusters that are too large."""

import pytest

from equipoise.engines.cluster.pieces import PieceSize
from equipoise.engines.cluster.round_costs import Cluster, ExchangeCosts, PhaseWork, estimate_phase, estimate_round

COSTS = ExchangeCosts(latency=2e-3, call=1e-3, byte=1e-9, fixed=5e-3, client=1e-6)
SIZE = PieceSize(1e8, 6)
WORK = PhaseWork("sums", 1.6e10, 1000, SIZE, 1e9, model_bytes=200_000, sum_bytes=200_000)


def test_one_worker_by_hand():
    """1.6e10 / 1e8 = 160, 1000 / 6 = 166: 128 pieces, one sum. 16 s of work, 3 ms of calls; bytes: 200,000 + 40,000 out,
    200,000 + 16,000 in.
    """
    found = estimate_phase(WORK, COSTS, Cluster())
    assert found.pieces == 128
    assert (found.bytes_out, found.bytes_in, found.busy) == (240_000, 216_000, 1)
    assert found.seconds == pytest.approx(16.0 + 3e-3 + 456e-6)
    assert estimate_round([WORK], COSTS, Cluster()).seconds == pytest.approx(found.seconds + 6e-3)


def test_workers_share_the_work_and_each_costs_a_call_a_model_and_a_sum():
    found = estimate_phase(WORK, COSTS, Cluster(4, 8))
    assert found.work == pytest.approx(0.5)
    assert found.calls == pytest.approx(2e-3 + 32e-3)
    assert found.bytes_out == 32 * 200_000 + 40_000
    assert found.bytes_in == 32 * 200_000 + 16_000


def test_a_large_model_goes_to_each_node_once():
    large = PhaseWork("sums", 1.6e10, 1000, SIZE, 1e9, model_bytes=4_000_000, sum_bytes=4_000_000)
    assert estimate_phase(large, COSTS, Cluster(4, 8)).bytes_out == 4 * 4_000_000 + 40_000


def test_three_workers_send_more_sums_since_their_stretches_are_no_whole_trees():
    """128 pieces in stretches 0 … 43, 43 … 85, 85 … 128: the trees within them are counted one by one."""
    found = estimate_phase(WORK, COSTS, Cluster(1, 3))
    assert found.work == pytest.approx(43 / 128 * 16.0)
    # 32+8+2+1, 1+4+16+16+4+1 (43 44 48 64 80 84), 1+2+8+32 (85 86 88 96)
    assert found.bytes_in == (4 + 6 + 4) * 200_000 + 16_000


@pytest.mark.parametrize(
    ("work", "cluster", "limit"),
    [
        (WORK, Cluster(1, 1), "local work"),
        (PhaseWork("sums", 1.6e10, 1000, SIZE, 1e8, 200_000, 200_000), Cluster(64, 16), "too few pieces"),
        (PhaseWork("sums", 1.6e10, 1000, SIZE, 1e13, 200, 200), Cluster(1, 64), "calls"),
        (PhaseWork("sums", 1.6e10, 1000, SIZE, 1e13, 8_000_000, 8_000_000), Cluster(8, 8, link=1e8), "traffic"),
        (PhaseWork("losses", 1e6, 10_000_000, SIZE, 1e12, 200), Cluster(1, 1), "driver"),
    ],
)
def test_what_limits_is_named(work, cluster, limit):
    assert estimate_round([work], COSTS, cluster).limit(cluster) == limit
