"""Each engine's numbers, from recordings of real engines where there are any."""

from pathlib import Path

import pytest

from extproc.adapters.telemetry import dialects
from extproc.adapters.telemetry.dialect import Numbers
from extproc.policy import Instances

METRICS = Path(__file__).parents[2] / "data" / "metrics"


def recorded(name: str) -> str:
    return (METRICS / f"{name}.prom").read_text()


def read(text: str, dialect: str = "auto") -> Numbers:
    numbers = dialects.read(text, dialect)
    assert numbers is not None
    return numbers


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("vllm-0.32.0-idle", Numbers(0, 0, 0, 0, 0, 32, 512)),
        ("vllm-0.32.0-busy", Numbers(4, 4, 0.21330724070450102, 25536, 37708, 32, 512)),
        ("vllm-0.32.0-after", Numbers(0, 0, 0, 25536, 41124, 32, 512)),
        ("vllm-0.32.0-lora-busy", Numbers(0, 1, 0.010033444816053505, 256, 14155, 32, 300, ("lora-a",))),
        ("vllm-0.32.0-smollm2-idle", Numbers(0, 0, 0, 0, 0, 32, 512)),
        ("llamacpp-xllamacpp-2026.10.11549-idle", Numbers(0, 0, None, 0, 0)),
        ("llamacpp-xllamacpp-2026.10.11549-busy", Numbers(4, 4, None, 16672, 5650 + 16672)),
        ("llamacpp-xllamacpp-2026.10.11549-after", Numbers(0, 0, None, 16772, 9608 + 16772)),
    ],
)
def test_a_recording_says_what_the_engine_was_doing(name: str, numbers: Numbers) -> None:
    assert read(recorded(name)) == numbers
    assert read(recorded(name), name.partition("-")[0]) == numbers


def test_each_policy_dialect_is_read_and_no_other() -> None:
    annotation = Instances.model_fields["dialect"].annotation
    assert set(annotation.__args__) == {"auto", *dialects.DIALECTS}  # type: ignore[union-attr]


def test_a_page_in_another_dialect_than_expected_is_not_guessed_at() -> None:
    assert dialects.read(recorded("vllm-0.32.0-busy"), "llamacpp") is None
    assert dialects.read('{"ollama": true}', "auto") is None
    assert dialects.read("", "auto") is None


@pytest.mark.parametrize(
    ("new", "old"),
    [
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
        ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
        ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries"),
    ],
)
def test_older_names_of_vllm_say_the_same(new: str, old: str) -> None:
    busy = recorded("vllm-0.32.0-busy")
    assert read(busy.replace(f"\n{new}{{", f"\n{old}{{")) == read(busy)


def test_where_vllm_publishes_both_names_the_new_one_counts_once() -> None:
    busy = recorded("vllm-0.32.0-busy")
    both = busy + 'vllm:gpu_cache_usage_perc{engine="0"} 0.9\nvllm:gpu_prefix_cache_hits_total{engine="0"} 1e9\n'
    assert read(both) == read(busy)


def test_data_parallel_ranks_of_vllm_add_up_and_usage_is_their_mean() -> None:
    lines = recorded("vllm-0.32.0-busy").splitlines()
    second = [line.replace('engine="0"', 'engine="1"') for line in lines if line.startswith("vllm:")]
    first, both = read("\n".join(lines)), read("\n".join([*lines, *second]))
    assert (both.waiting, both.running, both.prefix_hits, both.kv_blocks) == (8, 8, 2 * 25536, 1024)
    assert (both.kv_usage, both.block_tokens) == (first.kv_usage, 32)


def test_of_stale_adapter_series_the_latest_counts() -> None:
    def said(*series: tuple[str, str, float]) -> tuple[str, ...]:
        name = "vllm:lora_requests_info"
        rows = [
            f'{name}{{running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"}} {at}'
            for running, waiting, at in series
        ]
        return read("\n".join(rows)).adapters

    assert said(("a", "", 1.79e9), ("b, c", "d,b", 1.7900001e9), ("e", "e", 1.78e9)) == ("b", "c", "d")
    assert said(("a", "a", 1.0), ("", "", 2.0)) == ()


@pytest.mark.parametrize("broken", ["NaN", "+Inf", "-1", "garbage", "", "1 2 3 }{"])
@pytest.mark.parametrize(
    ("metric", "field"),
    [
        ("vllm:num_requests_waiting", "waiting"),
        ("vllm:num_requests_running", "running"),
        ("vllm:kv_cache_usage_perc", "kv_usage"),
        ("vllm:prefix_cache_hits_total", "prefix_hits"),
        ("vllm:prefix_cache_queries_total", "prefix_queries"),
    ],
)
def test_a_broken_metric_is_unknown_and_the_others_stand(metric: str, field: str, broken: str) -> None:
    busy = recorded("vllm-0.32.0-busy")
    lines = [
        f'{metric}{{engine="0",model_name="tiny"}} {broken}' if line.startswith(f"{metric}{{") else line
        for line in busy.splitlines()
    ]
    got, whole = read("\n".join(lines)), read(busy)
    expected = 1.0 if broken.startswith("1") else None
    assert getattr(got, field) == expected
    others = set(Numbers.__dataclass_fields__) - {field}
    assert {name: getattr(got, name) for name in others} == {name: getattr(whole, name) for name in others}


def test_a_missing_metric_is_unknown_and_the_others_stand() -> None:
    lines = [line for line in recorded("vllm-0.32.0-busy").splitlines() if "cache" not in line]
    assert read("\n".join(lines)) == Numbers(waiting=4, running=4)


def test_unresolved_block_numbers_of_vllm_are_unknown() -> None:
    got = read('vllm:num_requests_running 1\nvllm:cache_config_info{block_size="None",num_gpu_blocks="0"} 1')
    assert (got.running, got.block_tokens, got.kv_blocks) == (1, None, None)


def test_a_share_never_exceeds_one() -> None:
    assert read("vllm:kv_cache_usage_perc 1.02").kv_usage == 1.0


def test_sglang_is_read_with_its_cache_tiers_added() -> None:
    text = """
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",tp_rank="0"} 8.0
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
sglang:cached_tokens_total{model_name="m",cache_source="device"} 100.0
sglang:cached_tokens_total{model_name="m",cache_source="host"} 20.0
sglang:prompt_tokens_total{model_name="m"} 400.0
"""
    blocks = 'sglang:cache_config_info{page_size="64",num_pages="5000"} 1.0\n'
    assert read(text + blocks) == Numbers(3, 8, 0.25, 120, 400, 64, 5000)
    gauges = "sglang:page_size 64\nsglang:num_pages 5000\n"
    assert read(text + gauges) == Numbers(3, 8, 0.25, 120, 400, 64, 5000)


def test_trtllm_counts_blocks_and_is_given_in_tokens() -> None:
    text = """
trtllm_num_requests_waiting 2
trtllm_num_requests_running 5
trtllm_kv_cache_utilization 0.5
trtllm_kv_cache_reused_blocks_total 30
trtllm_kv_cache_missed_blocks_total 10
trtllm_kv_cache_tokens_per_block 32
trtllm_kv_cache_max_blocks 1000
"""
    assert read(text) == Numbers(2, 5, 0.5, 30 * 32, 40 * 32, 32, 1000)
    assert dialects.paths("trtllm") == ("/prometheus/metrics",)


def test_tgi_is_read() -> None:
    assert read("tgi_queue_size 2\ntgi_batch_current_size 7\n") == Numbers(waiting=2, running=7)


def test_auto_asks_the_common_path_first() -> None:
    assert dialects.paths("auto") == ("/metrics", "/prometheus/metrics")
