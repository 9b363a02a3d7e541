"""Figures are what they say, the search finds a known capacity, and a comparison tells a change from noise."""

import numpy as np
import pytest

from loadtest.generate.samples import CACHE_RESULTS, Samples
from loadtest.generate.traffic import TrafficSettings
from loadtest.measure.compare import bootstrap_interval, compare_blocks, figures_of, holm, paired_p, report
from loadtest.measure.figures import Slo, over_time, summarise
from loadtest.measure.search import SearchSettings, search
from loadtest.servers.target import Target, TargetError, fit_traffic, total


def samples_of(latencies, status=200, gap=0.01):
    samples = Samples.empty(len(latencies))
    samples.due[:] = samples.fired[:] = samples.sent[:] = np.arange(len(latencies)) * gap
    samples.done[:] = samples.due + latencies
    samples.status[:] = status
    samples.failure[:] = 0
    samples.candidates[:] = 64
    return samples


def test_percentiles_and_goodput_under_the_objective():
    summary = summarise(samples_of(np.linspace(0.001, 0.1, 100)), 1.0, Slo(latency_ms=50, share=0.6))
    assert summary["latency_ms"]["p50"] == pytest.approx(50.5)
    assert summary["latency_ms"]["max"] == pytest.approx(100)
    assert summary["goodput_rps"] == pytest.approx(50, abs=1)
    assert summary["offered_rps"] == 100
    assert not summary["holds_slo"]
    assert summarise(samples_of(np.full(100, 0.01)), 1.0, Slo())["holds_slo"]


def test_rejections_and_failures_are_not_goodput_and_not_in_the_latency():
    samples = samples_of(np.full(100, 0.01))
    samples.status[:10] = 429
    samples.status[10:15] = 0
    samples.failure[10:15] = 3
    samples.done[10:15] += 10
    summary = summarise(samples, 1.0, Slo())
    assert summary["good_share"] == pytest.approx(0.85)
    assert summary["statuses"] == {"200": 85, "429": 10}
    assert summary["failures"] == {"timeout": 5}
    assert summary["latency_ms"]["max"] == pytest.approx(10)


def test_samples_survive_the_disk(tmp_path):
    samples = samples_of(np.array([0.001, 0.002]))
    samples.cache[:] = CACHE_RESULTS.index("hit")
    samples.save(tmp_path / "samples.npz")
    again = Samples.load(tmp_path / "samples.npz")
    assert again.done.tolist() == samples.done.tolist()
    assert again.stages_ms.dtype == np.float32
    assert again.cache.tolist() == [1, 1]


def test_time_bins_show_when_it_was_slow():
    latencies = np.full(300, 0.01)
    latencies[100:200] = 0.2
    columns = over_time(samples_of(latencies), 1.0, Slo())
    assert columns["p99"].tolist() == pytest.approx([10, 200, 10])
    assert columns["good"].tolist() == [100, 0, 100]
    assert columns["offered"].tolist() == [100, 100, 100]


@pytest.mark.parametrize("capacity", [7, 40, 333, 5_000])
def test_the_search_finds_a_known_capacity(capacity):
    found = search(lambda rate: "holds" if rate <= capacity else "breaks", SearchSettings(start_rps=50))
    assert 0.93 * capacity <= found.capacity_rps <= capacity
    assert [verdict for _, verdict in found.trials].count("holds") >= 3


def test_a_rate_that_held_by_luck_is_not_reported():
    random = np.random.default_rng(1)

    def flaky(rate):
        return "holds" if rate <= 100 or (rate < 140 and random.random() < 0.5) else "breaks"

    rates = [search(flaky, SearchSettings(start_rps=50)).capacity_rps for _ in range(40)]
    assert np.median(rates) < 125
    assert search(lambda rate: "breaks", SearchSettings()).capacity_rps == 0


def test_a_search_that_ends_at_the_generator_says_so():
    found = search(lambda rate: "holds" if rate <= 90 else "generator", SearchSettings(start_rps=50))
    assert found.limited_by_generator
    assert found.capacity_rps > 80


def blocks(random, count, slowdown=1.0, drift=None):
    drift = np.ones(count) if drift is None else drift
    latencies = [0.004 * factor * slowdown * random.gamma(20, 1 / 20, 400) for factor in drift]
    return [figures_of(samples_of(values), Slo()) for values in latencies]


def test_equal_servers_are_seldom_called_different_and_a_slowdown_is_found():
    """The machine drifts by a third over the session: alternated pairs cancel it. A 12 % slowdown is the negative control."""
    random = np.random.default_rng(7)
    drift = np.linspace(1.0, 1.35, 8)
    equal = [
        compare_blocks(blocks(random, 8, drift=drift), blocks(random, 8, drift=drift))["verdict"] for _ in range(40)
    ]
    assert equal.count("no difference shown") >= 37
    slower = compare_blocks(blocks(random, 8, drift=drift), blocks(random, 8, 1.12, drift))
    faster = compare_blocks(blocks(random, 8, 1.12, drift), blocks(random, 8, drift=drift))
    assert (slower["verdict"], faster["verdict"]) == ("worse", "better")
    p50 = slower["differences"][0]
    assert p50["ratio"] == pytest.approx(1.12, abs=0.02)
    assert p50["ratio_low"] < p50["ratio"] < p50["ratio_high"]
    assert report(slower).endswith("Verdict: B is worse.\n")


def test_quick_refusals_do_not_look_fast():
    samples = samples_of(np.full(100, 0.02))
    samples.status[:10] = 429
    samples.done[:10] = samples.due[:10] + 0.001
    assert figures_of(samples, Slo(latency_ms=50))["p95_ms"] == pytest.approx(50)


def test_a_significant_trifle_is_no_verdict():
    random = np.random.default_rng(3)
    comparison = compare_blocks(blocks(random, 12), blocks(random, 12, 1.02), smallest_effect=0.05)
    assert comparison["verdict"] == "no difference shown"


def test_too_few_blocks_are_refused():
    random = np.random.default_rng(1)
    with pytest.raises(ValueError, match="at least 8"):
        compare_blocks(blocks(random, 7), blocks(random, 7))


def test_p_values():
    assert paired_p(np.ones(6)) == pytest.approx(2 / 64)
    assert paired_p(np.array([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])) == 1
    assert paired_p(np.full(20, 0.5)) < 0.001
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    low, high = bootstrap_interval(np.array([1.0, 2.0, 3.0]))
    assert 1 <= low < 2 < high <= 3


def test_a_metric_is_summed_over_the_series_that_carry_the_labels():
    exposition = (
        "# TYPE d_seconds histogram\n"
        'd_seconds_count{route="/rank"} 1050\nd_seconds_sum{route="/rank"} 1\n'
        'd_seconds_count{route="/retrieve"} 50\nd_seconds_sum{route="/retrieve"} 1\n'
    )
    assert total(exposition, "d_seconds_count", route="/rank") == 1050
    assert total(exposition, "d_seconds_count") == 1100
    assert total(exposition, "nothing") == 0


def test_traffic_is_cut_to_the_server_and_addresses_are_checked():
    info = {
        "architecture": {"history_length": 63},
        "limits": {"max_candidates": 128},
        "actions": ["action_0", "action_1"],
    }
    fitted = fit_traffic(TrafficSettings(), info)
    assert (fitted.history_window, fitted.max_candidates, fitted.actions) == (63, 128, ("0", "1"))
    assert fit_traffic(TrafficSettings(), {}) == TrafficSettings()
    assert Target.parse("http://localhost:8100").origin == "http://localhost:8100"
    of_ipv6 = Target.parse("http://[::1]:8100")
    assert (of_ipv6.host, of_ipv6.origin) == ("::1", "http://[::1]:8100")
    assert b"\r\nHost: [::1]:8100\r\n" in of_ipv6.request(b"{}")
    with pytest.raises(TargetError, match="not an http"):
        Target.parse("localhost:8100")
    with pytest.raises(TargetError, match="does not answer"):
        Target.parse("http://127.0.0.1:1").info()
