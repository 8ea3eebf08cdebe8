from extproc.tokenpilot.health import Health


def test_an_instance_rests_after_so_many_failures_in_a_row() -> None:
    health = Health(fail_after=2, rest_s=5.0)
    health.failed(3, 0.0)
    assert health.resting(0.0) == []
    health.failed(3, 1.0)
    assert health.resting(1.0) == [3]
    assert health.resting(5.999) == [3]
    assert health.resting(6.0) == []


def test_a_success_in_between_begins_the_row_anew() -> None:
    health = Health(fail_after=2, rest_s=5.0)
    health.failed(0, 0.0)
    health.served(0)
    health.failed(0, 0.0)
    assert health.resting(0.0) == []


def test_the_probe_s_failure_rests_it_again_at_once_and_its_success_forgets_everything() -> None:
    health = Health(fail_after=3, rest_s=5.0)
    for _ in range(3):
        health.failed(0, 0.0)
    assert health.resting(5.0) == []
    health.failed(0, 5.0)
    assert health.resting(9.9) == [0]
    health.served(0)
    assert health.resting(9.9) == []
    health.failed(0, 10.0)
    assert health.resting(10.0) == []
