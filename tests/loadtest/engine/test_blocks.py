import pytest

from loadtest.engine.blocks import BlockPool


def test_no_more_blocks_can_be_had_than_there_are() -> None:
    pool = BlockPool(3)
    pool.grow(3)
    assert (pool.available, pool.live) == (0, 3)
    with pytest.raises(ValueError, match="1 blocks wanted, 0 available"):
        pool.grow(1)


def test_an_idle_block_keeps_its_name_until_its_room_is_needed() -> None:
    pool = BlockPool(3)
    pool.grow(2)
    assert pool.name("a")
    pool.release(["a"], 1)
    assert (pool.match(["a", "b"]), pool.idle_among(["a"]), pool.holders("a")) == (1, 1, 0)
    pool.grow(2)  # one empty, then the unnamed block, which was given back first
    assert pool.match(["a"]) == 1
    pool.grow(1)
    assert pool.match(["a"]) == 0
    assert pool.evictions == 2


def test_a_shared_block_stays_live_until_its_last_holder_goes() -> None:
    pool = BlockPool(2)
    pool.grow(1)
    pool.name("a")
    pool.share(["a"])
    pool.release(["a"], 0)
    assert (pool.holders("a"), pool.live) == (1, 1)
    pool.release(["a"], 0)
    assert (pool.holders("a"), pool.live) == (0, 0)


def test_a_second_copy_of_a_live_block_stays_unnamed_and_of_an_idle_one_takes_its_name() -> None:
    pool = BlockPool(4)
    pool.grow(2)
    assert pool.name("a")
    assert not pool.name("a")
    pool.release(["a"], 1)
    pool.grow(1)
    assert pool.name("a")
    assert (pool.holders("a"), pool.live, pool.available) == (1, 1, 3)


def test_what_is_used_again_is_evicted_later() -> None:
    pool = BlockPool(2)
    for name in ("a", "b"):
        pool.grow(1)
        pool.name(name)
        pool.release([name], 0)
    pool.share(["a"])
    pool.release(["a"], 0)
    pool.grow(1)
    assert [pool.match([name]) for name in ("a", "b")] == [1, 0]


def test_a_cleared_pool_has_forgotten_what_is_idle_and_kept_what_is_live() -> None:
    pool = BlockPool(2)
    for name in ("a", "b"):
        pool.grow(1)
        pool.name(name)
    pool.release(["a"], 0)
    pool.clear()
    assert [pool.match([name]) for name in ("a", "b")] == [0, 1]
    assert pool.available == 1
