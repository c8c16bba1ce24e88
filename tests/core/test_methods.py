"""What a job asks for with each attempt."""

from __future__ import annotations

from posttrain.core.methods import Resources


def test_requests_grow_with_each_attempt():
    need = Resources(mem_gb=4, hours=2)
    assert [need.minutes(attempt) for attempt in (1, 2, 3)] == [120, 240, 360]
    assert [need.megabytes(attempt) for attempt in (1, 2, 3)] == [4096, 6144, 9216]
    assert Resources(hours=1e-9).minutes(1) == 1


def test_requests_stay_below_what_the_cluster_has():
    need = Resources(mem_gb=300, hours=24, max_mem_gb=500, max_hours=24)
    assert [need.minutes(attempt) for attempt in (1, 2, 3)] == [1440] * 3
    assert [need.megabytes(attempt) for attempt in (1, 2, 3)] == [307200, 460800, 512000]
