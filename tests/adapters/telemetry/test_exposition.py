"""The page search against the library's full parser, on what real engines published."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.adapters.telemetry.exposition import Page, Sample

METRICS = Path(__file__).parents[2] / "data" / "metrics"
RECORDINGS = sorted(METRICS.glob("*.prom"))


def test_there_are_recordings_of_both_engines() -> None:
    assert {path.name.partition("-")[0] for path in RECORDINGS} == {"vllm", "llamacpp"}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_every_sample_of_a_recording_is_found_as_the_full_parser_finds_it(path: Path) -> None:
    text = path.read_text()
    parsed: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            parsed.setdefault(sample.name, []).append(Sample(sample.labels, sample.value))
    page = Page(text)
    assert len(parsed) > 10
    for name, samples in parsed.items():
        # The library names a counter with the suffix that its writer may have left out.
        found = page.samples(name) or page.samples(name.removesuffix("_total"))
        assert found == [one for one in samples if math.isfinite(one.value) and one.value >= 0], name


@given(label=st.text(), value=st.floats(min_value=0, allow_infinity=False, allow_nan=False))
def test_any_label_that_the_library_writes_is_read_back(label: str, value: float) -> None:
    registry = CollectorRegistry()
    Gauge("free", "no label", registry=registry).set(1)
    Gauge("named", "with a label", ["other", "what"], registry=registry).labels("x", label).set(value)
    assert Page(generate_latest(registry).decode()).samples("named") == [Sample({"other": "x", "what": label}, value)]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("m 1", [1.0]),
        ("m 1\n", [1.0]),
        ("m\t2.5e3", [2500.0]),
        ("m{} 3", [3.0]),
        ('m{a="b"}4', [4.0]),
        ('m {a="b"} 4', [4.0]),
        ('m{a="}{ \\"m 9\\""} 5 1700000000000', [5.0]),
        ('m{a="b"} 6 # {trace="x"} 7', [6.0]),
        ("m 1\r\nm 2\r\n", [1.0, 2.0]),
        ("# m 1\n#m 2\n# HELP m 3\n# TYPE m gauge\n", []),
        ("mm 1\nm_total 2\nm:x 3\nxm 4", []),
        ("m NaN\nm +Inf\nm -Inf\nm -1\nm 7", [7.0]),
        ("m\nm \nm{\nm{} \nm abc\nm 8", [8.0]),
        ('m{a="unclosed} 1\nm{a="b" 2\nm{a="b"} 9', [9.0]),
        ("", []),
    ],
)
def test_a_line_is_read_or_left_out_and_spoils_no_other(text: str, values: list[float]) -> None:
    assert [sample.value for sample in Page(text).samples("m")] == values


@given(st.text(alphabet='m{}="\\ \n\t1a,#-'))
def test_no_text_is_an_error(text: str) -> None:
    assert all(sample.value >= 0 for sample in Page(text).samples("m"))
