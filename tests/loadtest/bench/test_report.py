import io

from rich.console import Console

from loadtest.bench import report
from loadtest.bench.held import Held
from loadtest.bench.slices import Cell, Figures, Table


def some_figures(**fields: float) -> Figures:
    base = {"p50_ms": 1.0, "p99_ms": 2.0, "requests_per_s": 1000.0, "python_cpu_us_per_request": 500.0}
    return Figures(**base | {"envoy_cpu_us_per_request": 400.0} | fields)


def a_table(size: str, clients: int, ours: Figures, noop: Figures | None = None) -> Table:
    direct = some_figures(p50_ms=0.5, python_cpu_us_per_request=0.0)
    return {Cell(size, clients): {"direct": direct, "noop": noop or some_figures(), "tokenfleet": ours}}


def verdicts(table: Table, held: Held | None = None) -> list[bool]:
    return [one.met for one in report.aims(table, held)]


def test_throughput_is_judged_against_the_noop() -> None:
    assert verdicts(a_table("2KB", 32, some_figures(requests_per_s=850.0))) == [True]
    assert verdicts(a_table("2KB", 32, some_figures(requests_per_s=849.0))) == [False]


def test_added_latency_is_judged_without_what_direct_takes() -> None:
    assert verdicts(a_table("2KB", 1, some_figures(p50_ms=1.14))) == [True]
    assert verdicts(a_table("2KB", 1, some_figures(p50_ms=1.16))) == [False]


def test_long_prompts_are_judged_by_requests_a_core() -> None:
    assert verdicts(a_table("400KB", 1, some_figures(python_cpu_us_per_request=6666.0))) == [True]
    assert verdicts(a_table("400KB", 1, some_figures(python_cpu_us_per_request=6700.0))) == [False]


def test_memory_is_judged_and_so_is_a_leak() -> None:
    assert verdicts({}, Held(5000, 50 * 1024, 1, 0)) == [True, True]
    assert verdicts({}, Held(5000, 50 * 1024 + 1, 1, 2)) == [False, False]


def test_the_json_has_the_agreed_shape() -> None:
    table = a_table("2KB", 1, some_figures()) | a_table("2KB", 32, some_figures())
    tree = report.to_json(table, {}, {}, Held(5000, 30_000, 60_000, 0), {"quick": True})
    assert tree["held"]["requests"] == 5000
    assert tree["held"]["bytes_each"] == 30_000
    assert set(tree["overhead"]["2KB"]) == {"direct", "noop", "tokenfleet"}
    assert set(tree["overhead"]["2KB"]["noop"]) == {"clients_1", "clients_32"}
    assert tree["overhead"]["2KB"]["noop"]["clients_1"] == {
        "p50_ms": 1.0,
        "p99_ms": 2.0,
        "requests_per_s": 1000.0,
        "python_cpu_us_per_request": 500.0,
        "envoy_cpu_us_per_request": 400.0,
    }


def test_a_miss_is_said_plainly() -> None:
    out = io.StringIO()
    report.show(Console(file=out, width=160), a_table("2KB", 32, some_figures(requests_per_s=500.0)), {}, {}, None)
    assert "miss" in out.getvalue()
    assert "50%" in out.getvalue()
    assert "pass" not in out.getvalue()
