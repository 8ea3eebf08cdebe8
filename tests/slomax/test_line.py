from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.policy import ClassSpec
from extproc.slomax.line import Line
from tests.builders import a_request

HIGH = ClassSpec(name="high", priority=10)
LOW = ClassSpec(name="low", priority=0)


def added(line: Line, name: str, klass: ClassSpec = LOW, until: float = 10.0, **fields: Any) -> None:
    line.add(a_request(id=name, **fields), klass, until)


def looked_at(line: Line, look_ahead: int = 8, worth: tuple[str, ...] | None = None) -> list[str]:
    return [one.request.id for one in line.heads(look_ahead, lambda model: worth is None or model in worth)]


def test_a_queue_is_in_order_of_first_arrival_whenever_it_was_offered() -> None:
    line = Line()
    added(line, "third", arrived=3.0)
    added(line, "first", arrived=1.0)
    added(line, "second", arrived=1.0)
    assert looked_at(line) == ["first", "second", "third"]


def test_queues_are_looked_at_by_priority_then_by_who_came_first() -> None:
    line = Line()
    added(line, "low-old", LOW, model="m", arrived=0.0)
    added(line, "high-new", HIGH, model="m", arrived=5.0)
    added(line, "high-old", HIGH, model="n", arrived=4.0)
    assert looked_at(line) == ["high-old", "high-new", "low-old"]


def test_unlike_requests_of_a_class_are_looked_at_in_order_of_arrival() -> None:
    line = Line()
    eu = frozenset({"eu"})
    for i, residency in enumerate((eu, None, eu, None)):
        added(line, f"r{i}", arrived=float(i), residency=residency)
    assert looked_at(line) == ["r0", "r1", "r2", "r3"]
    assert line.has_like(a_request(residency=eu), LOW)
    assert not line.has_like(a_request(residency=frozenset({"us"})), LOW)
    assert not line.has_like(a_request(), HIGH)


def test_models_that_are_not_worth_it_are_not_looked_at() -> None:
    line = Line()
    added(line, "m", model="m")
    added(line, "n", model="n")
    assert looked_at(line, worth=("n",)) == ["n"]


def test_deadlines_of_those_who_have_left_are_forgotten() -> None:
    line = Line()
    for i in range(10_000):
        added(line, f"r{i}", until=600.0)
        line.remove(f"r{i}")
    assert len(line._expiry) <= 1025
    added(line, "last", until=1.0)
    assert [one.request.id for one in line.expired(1.0)] == ["last"]


def test_only_so_many_of_a_queue_are_looked_at() -> None:
    line = Line()
    for i in range(5):
        added(line, f"r{i}", arrived=float(i))
    assert looked_at(line, 2) == ["r0", "r1"]


def test_who_has_left_is_gone_and_leaving_twice_is_nothing() -> None:
    line = Line()
    added(line, "one")
    added(line, "two", HIGH)
    gone = line.remove("one")
    assert gone is not None
    assert gone.request.id == "one"
    assert line.remove("one") is None
    assert "one" not in line
    assert line.get("one") is None
    assert len(line) == 1
    assert line.counts() == {"low": 0, "high": 1}
    assert looked_at(line) == ["two"]


def test_a_wait_is_over_at_its_time_and_not_before() -> None:
    line = Line()
    added(line, "late", until=2.0)
    added(line, "early", until=1.0)
    assert line.expired(0.999) == []
    assert [one.request.id for one in line.expired(1.0)] == ["early"]
    assert [one.request.id for one in line.expired(5.0)] == ["late"]
    assert len(line) == 0


def test_an_old_expiry_does_not_end_a_request_that_came_again() -> None:
    line = Line()
    added(line, "one", until=1.0)
    line.remove("one")
    added(line, "one", until=2.0)
    assert line.expired(1.5) == []
    assert [one.request.id for one in line.expired(2.0)] == ["one"]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "remove", "expire"]),
        st.integers(0, 9),
        st.floats(0, 10),
        st.sampled_from([HIGH, LOW]),
        st.sampled_from(["m", "n"]),
    ),
    max_size=60,
)


@given(STEPS)
def test_a_line_is_what_a_plain_list_would_be(steps: list[tuple[str, int, float, ClassSpec, str]]) -> None:
    line = Line()
    plain: dict[str, tuple[float, int, ClassSpec, str, float]] = {}
    for i, (what, number, at, klass, model) in enumerate(steps):
        name = f"r{number}"
        if what == "add" and name not in plain:
            added(line, name, klass, until=at + 1, model=model, arrived=at)
            plain[name] = (at, i, klass, model, at + 1)
        elif what == "remove":
            assert (line.remove(name) is not None) == (plain.pop(name, None) is not None)
        elif what == "expire":
            over = {one.request.id for one in line.expired(at)}
            assert over == {one for one, row in plain.items() if row[4] <= at}
            plain = {one: row for one, row in plain.items() if one not in over}
        assert len(line) == len(plain)
        for one in (HIGH, LOW):
            assert line.of_class(one.name) == sum(row[2] is one for row in plain.values())
        order = sorted(plain, key=lambda key: (-plain[key][2].priority, *plain[key][:2]))
        assert looked_at(line, 100) == order
