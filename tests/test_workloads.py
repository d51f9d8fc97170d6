"""Workloads: what arrives when, how long it is, and what loaders do with bad rows."""

import gzip
import itertools
import json
import math
import statistics

import pytest

from minichunk import workloads
from minichunk.core.request import PromptShape, RequestSpec
from minichunk.workloads import (
    Lengths,
    bursty,
    closed_loop,
    describe,
    load,
    load_azure,
    load_mooncake,
    load_sharegpt_lengths,
    merge,
    multi_tenant,
    poisson,
    stall_scene,
)


def gaps_of(workload):
    return [after.arrival - before.arrival for before, after in itertools.pairwise(workload)]


def test_the_scene_is_ten_decodes_and_one_long_prompt():
    scene = list(stall_scene())
    assert [len(spec.prompt) for spec in scene] == [32] * 10 + [8000]
    assert all(spec.arrival == 0 for spec in scene[:10])
    assert scene[-1].arrival > 0


def test_poisson_gaps_have_mean_and_spread_of_an_exponential(seed):
    gaps = gaps_of(poisson(4.0, 4000, seed=seed))
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(1.0, rel=0.15)


def test_bursty_gaps_have_the_asked_spread(seed):
    gaps = gaps_of(bursty(4.0, 20000, cv=3.0, seed=seed))
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.15)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(3.0, rel=0.2)


def test_a_seed_names_a_workload_and_the_rate_changes_only_arrivals(seed):
    lengths = {"prompt": Lengths(300, p90=900), "output": Lengths(50, p90=90)}
    first, again = (poisson(2.0, 50, seed=seed, **lengths) for _ in range(2))
    assert first == again
    faster = poisson(4.0, 50, seed=seed, **lengths)
    assert [len(s.prompt) for s in first] == [len(s.prompt) for s in faster]
    assert faster.requests[-1].arrival == pytest.approx(first.requests[-1].arrival / 2)
    assert poisson(2.0, 50, seed=seed + 1, **lengths) != first


def test_lengths_meet_median_and_p90(rng):
    draws = sorted(Lengths(1730, p90=5696).draw(rng) for _ in range(8000))
    assert draws[4000] == pytest.approx(1730, rel=0.08)
    assert draws[7200] == pytest.approx(5696, rel=0.1)
    assert draws[0] >= 1


def test_lengths_keep_their_bounds_and_values(rng):
    bounded = Lengths(500, p90=5000, minimum=200, maximum=900)
    assert {min(900, max(200, n)) - n for n in (bounded.draw(rng) for _ in range(500))} == {0}
    assert {Lengths(7).draw(rng) for _ in range(20)} == {7}
    assert {Lengths.of([3, 5]).draw(rng) for _ in range(60)} == {3, 5}


@pytest.mark.parametrize(
    ("make", "named"),
    [(lambda: Lengths(0), "median=0"), (lambda: Lengths(100, p90=50), "p90=50"),
     (lambda: Lengths(5, minimum=9, maximum=3), "minimum=9"), (lambda: Lengths.of([]), "value"),
     (lambda: poisson(0, 5), "rate=0"), (lambda: bursty(1, 5, cv=-1), "cv=-1"),
     (lambda: bursty(1, 5, cv=1e-9), "cv=1e-09"), (lambda: poisson(math.inf, 5), "rate=inf"),
     (lambda: closed_loop(1, 5, think_time=math.inf), "think_time=inf"),
     (lambda: closed_loop(0, 5), "num_users=0"), (lambda: stall_scene(-1), "num_decodes=-1"),
     (lambda: poisson(1, 5).scaled(0), "speed=0"),
     (lambda: merge(poisson(1, 5), closed_loop(2, 2)), "closed loop of 2 users")],
)  # fmt: skip
def test_impossible_settings_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()


def test_a_closed_loop_asks_again_after_thinking(seed):
    loop = closed_loop(3, 4, prompt=Lengths(100, p90=300), think_time=2.0, seed=seed)
    assert len(loop) == 3
    for first in loop:
        chain, spec, now = [first], first, 0.0
        while spec := loop.on_finish(spec, now := spec.arrival + 1.0):
            assert spec.arrival >= now
            chain.append(spec)
        assert len(chain) == 4
        assert len({(spec.user, spec.turn) for spec in chain}) == 4
        # Nothing is remembered: the same answer leads to the same question again.
        assert loop.on_finish(first, 5.0) == loop.on_finish(first, 5.0)
    assert poisson(1, 3).on_finish(poisson(1, 3).requests[0], 1.0) is None


def test_tenants_are_merged_by_arrival():
    both = multi_tenant({"a": poisson(2, 30, seed=1), "b": bursty(5, 60, seed=2)})
    arrivals = [spec.arrival for spec in both]
    assert arrivals == sorted(arrivals)
    assert [spec.tenant for spec in both].count("a") == 30
    assert len(both) == 90


def test_head_and_scaled_keep_the_rest():
    workload = poisson(2, 30, seed=1)
    assert workload.head(5).requests == workload.requests[:5]
    fast = workload.scaled(2)
    assert [spec.arrival * 2 for spec in fast] == pytest.approx([s.arrival for s in workload])


def test_a_workload_can_be_brought_to_any_rate(rng):
    rate = rng.uniform(0.1, 50)
    workload = bursty(3, 40, seed=rng.randrange(1000))
    assert workload.at_rate(rate).rate == pytest.approx(rate)
    with pytest.raises(ValueError, match="all at once"):
        workload.head(1).at_rate(2.0)


def test_describe_counts_and_sums():
    text = describe(stall_scene(10, 8000))
    assert "11 requests" in text
    assert "max 8000" in text
    assert "total 8,320" in text
    assert "no requests" in describe([])
    assert "all at once" in describe([RequestSpec(0.0, (1, 2, 3), 5)])


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:51.2224670,879,55
"""


def test_azure_rows_become_requests_from_time_zero(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    workload = load_azure(path)
    assert [spec.arrival for spec in workload] == pytest.approx([0.0, 4.314579, 4.541877])
    assert [(len(s.prompt), s.output_tokens) for s in workload] == [
        (374, 44),
        (396, 109),
        (879, 55),
    ]
    assert load(path).requests == workload.requests
    assert len(load_azure(path, limit=2)) == 2
    with gzip.open(tmp_path / "azure.csv.gz", "wt") as file:
        file.write(AZURE)
    assert load(tmp_path / "azure.csv.gz").requests == workload.requests


def test_bad_rows_are_counted_and_named_and_the_rest_is_read(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        AZURE + "yesterday,10,10\n2023-11-16 18:16:00.1,ten,10\n2023-11-16 18:16:00.1,10\n"
        "2023-11-16 18:16:01.1,0,10\n\x00\xff broken\n2023-11-16 18:17:00.5,77,7\n"
    )
    with pytest.warns(UserWarning, match=r"5 of 9 rows left out \(row 4: .*yesterday"):
        workload = load_azure(path)
    assert len(workload) == 4
    assert [int(row.split()[1].rstrip(":")) for row in workload.bad_rows] == [4, 5, 6, 7, 8]
    assert "5 bad rows left out" in describe(workload)


def test_a_file_without_a_readable_row_is_refused(tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n")
    with pytest.raises(ValueError, match=r"bad\.csv: no readable rows \(row 1"):
        load(path)
    path.write_text("name,age\nme,7\n")
    with pytest.raises(ValueError, match=r"starts with 'name,age'.*ContextTokens"):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nowhere.csv")


def test_chat_lengths_arrive_as_a_poisson_process(tmp_path, seed):
    path = tmp_path / "chat.csv"
    rows = "".join(f"{100 + i},{10 + i},0,0\n" for i in range(2000))
    path.write_text(f"num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n{rows}")
    workload = load_sharegpt_lengths(path, rate=5.0, seed=seed)
    assert statistics.mean(gaps_of(workload)) == pytest.approx(0.2, rel=0.15)
    assert [len(spec.prompt) for spec in workload] == list(range(100, 2100))
    assert len(load(path, rate=2.0, limit=7)) == 7
    with pytest.raises(ValueError, match="rate=0"):
        load_sharegpt_lengths(path, rate=0)


def test_mooncake_block_ids_become_shared_prefixes(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 3000, "input_length": 1100, "output_length": 20, "hash_ids": [7, 8, 10]},
        {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]},
    ]
    lines = [json.dumps(row) for row in rows]
    path.write_text(
        "\n".join([*lines, "", "{broken", '{"timestamp": 1}', '{"timestamp": "nan", '
                   '"input_length": 5, "output_length": 5}', "[1, 2]"])
    )  # fmt: skip
    with pytest.warns(UserWarning, match="4 of 6 rows"):
        workload = load(path)
    with pytest.warns(UserWarning, match="4 of 6 rows"):
        assert load_mooncake(path).requests == workload.requests
    assert [spec.arrival for spec in workload] == [0.0, 2.0]
    assert workload.requests[0].prompt == PromptShape(1030, (7, 8, 9), 512)


def test_shared_prefixes_hit_the_prefix_cache():
    import minichunk as mc

    ids = (1, 2, 3, 4)
    specs = [RequestSpec(float(i), PromptShape(2048 + 50, ids, 512), 4) for i in range(4)]
    trace = mc.simulate(specs, model="llama-3-8b", gpu="h100-sxm", check_invariants=True)
    assert trace.metrics().cached_tokens == 3 * 2048
    cold = mc.simulate(specs, model="llama-3-8b", gpu="h100-sxm", prefix_caching=False)
    assert cold.metrics().cached_tokens == 0
    assert trace.metrics().ttft.p50 < cold.metrics().ttft.p50 / 3


def test_every_public_name_is_there():
    assert all(hasattr(workloads, name) for name in workloads.__all__)
    assert math.isfinite(stall_scene().requests[-1].arrival)


@pytest.mark.parametrize("name", ["median", "p90", "minimum", "maximum"])
def test_a_length_that_is_text_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}='500' must be a number of tokens"):
        workloads.Lengths(**{"median": 500, name: "500"})


def test_a_workload_is_shown_by_its_counts():
    many = workloads.poisson(5.0, 1000)
    assert repr(many) == f"<Workload {many.name!r}: 1000 requests>"
    spoilt = workloads.Workload("w", many.requests[:2], ("row 3", "row 4"))
    assert repr(spoilt) == "<Workload 'w': 2 requests, 2 bad rows left out>"
    loop = workloads.closed_loop(3, 2)
    assert repr(loop).startswith("<ClosedLoop")
    assert len(repr(loop)) < 80
