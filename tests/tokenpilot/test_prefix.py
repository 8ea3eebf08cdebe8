from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from extproc.tokenpilot.prefix import PrefixIndex

ROOMY = 1000


def test_only_a_contiguous_prefix_counts() -> None:
    index = PrefixIndex(60.0)
    index.insert(0, (1, 2, 3), 0.0, ROOMY)
    index.insert(1, (1,), 0.0, ROOMY)
    index.insert(2, (2, 3), 0.0, ROOMY)
    assert index.match((1, 2, 3, 4)) == {0: 3, 1: 1}
    assert index.match((1, 9, 3)) == {0: 1, 1: 1}
    assert index.match((9,)) == {}
    assert index.match(()) == {}


def test_a_full_slot_forgets_the_deep_end_of_the_least_recent_chain_first() -> None:
    index = PrefixIndex(60.0)
    index.insert(0, (1, 2, 3), 0.0, 5)
    index.insert(0, (7, 8, 9), 1.0, 5)
    assert index.match((1, 2, 3)) == {0: 2}, "the head is worth more than the end"
    assert index.match((7, 8, 9)) == {0: 3}


def test_a_chain_that_is_used_again_stays() -> None:
    index = PrefixIndex(60.0)
    index.insert(0, (1, 2), 0.0, 4)
    index.insert(0, (7, 8), 1.0, 4)
    index.insert(0, (1, 2), 2.0, 4)
    index.insert(0, (5, 6), 3.0, 4)
    assert index.match((1, 2)) == {0: 2}
    assert index.match((7, 8)) == {}


def test_a_chain_longer_than_the_cache_leaves_its_head() -> None:
    index = PrefixIndex(60.0)
    index.insert(0, tuple(range(1, 11)), 0.0, 4)
    assert index.match(tuple(range(1, 11))) == {0: 4}
    assert len(index) == 4


def test_a_slot_that_restarted_has_nothing() -> None:
    index = PrefixIndex(60.0)
    index.insert(0, (1, 2), 0.0, ROOMY)
    index.insert(1, (1,), 0.0, ROOMY)
    index.forget(0)
    index.forget(0)
    assert index.match((1, 2)) == {1: 1}
    assert len(index) == 1


def test_what_is_taken_back_is_gone_there_alone() -> None:
    index = PrefixIndex(60.0)
    index.insert(0, (1, 2, 3), 0.0, ROOMY)
    index.insert(1, (1, 2, 3), 0.0, ROOMY)
    index.discard(0, (2, 3, 99))
    index.discard(7, (1,))
    assert index.match((1, 2, 3)) == {0: 1, 1: 3}


def test_a_block_expires_after_its_last_use_and_not_before() -> None:
    index = PrefixIndex(10.0)
    index.insert(0, (1, 2), 0.0, ROOMY)
    index.insert(0, (1,), 5.0, ROOMY)
    index.expire(10.0)
    assert index.match((1, 2)) == {0: 2}
    index.expire(10.1)
    assert index.match((1, 2)) == {0: 1}
    index.expire(15.1)
    assert len(index) == 0


def test_slots_beyond_a_machine_word_are_slots_like_others() -> None:
    index = PrefixIndex(60.0)
    for slot in (0, 63, 64, 500):
        index.insert(slot, (1, 2)[: 1 + slot % 2], 0.0, ROOMY)
    assert index.match((1, 2)) == {0: 1, 63: 2, 64: 1, 500: 1}


class AgainstNaive(RuleBasedStateMachine):
    """The same index as plain lists: by slot, blocks from the least to the most recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(20.0)
        self.held: dict[int, dict[int, float]] = {}
        self.now = 0.0

    slots = st.integers(0, 3)
    # Chained hashes: a block tells all that came before it, so chains are paths of one tree.
    chains = st.lists(st.integers(0, 1), max_size=6).map(
        lambda path: tuple(int("1" + "".join(map(str, path[: i + 1])), 2) for i in range(len(path)))
    )

    @rule(slot=slots, blocks=chains, capacity=st.integers(1, 8), passed=st.floats(0, 5))
    def insert(self, slot: int, blocks: tuple[int, ...], capacity: int, passed: float) -> None:
        self.now += passed
        self.index.insert(slot, blocks, self.now, capacity)
        held = self.held.setdefault(slot, {})
        for block in reversed(blocks[:capacity]):
            held.pop(block, None)
            held[block] = self.now
        while len(held) > capacity:
            held.pop(next(iter(held)))

    @rule(slot=slots, blocks=chains)
    def discard(self, slot: int, blocks: tuple[int, ...]) -> None:
        self.index.discard(slot, blocks)
        for block in blocks:
            self.held.get(slot, {}).pop(block, None)

    @rule(slot=slots)
    def forget(self, slot: int) -> None:
        self.index.forget(slot)
        self.held.pop(slot, None)

    @rule(passed=st.floats(0, 15))
    def expire(self, passed: float) -> None:
        self.now += passed
        self.index.expire(self.now)
        for held in self.held.values():
            for block in [one for one, used in held.items() if self.now - used > 20.0]:
                del held[block]

    @rule(blocks=chains)
    def match(self, blocks: tuple[int, ...]) -> None:
        depths = {}
        for slot, held in self.held.items():
            depth = 0
            while depth < len(blocks) and blocks[depth] in held:
                depth += 1
            if depth:
                depths[slot] = depth
        assert self.index.match(blocks) == depths

    @invariant()
    def as_many_blocks(self) -> None:
        assert len(self.index) == len({block for held in self.held.values() for block in held})


TestAgainstNaive = AgainstNaive.TestCase
TestAgainstNaive.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 2**64 - 1), unique=True, max_size=50), st.integers(1, 60))
def test_a_slot_never_holds_more_than_it_can(blocks: list[int], capacity: int) -> None:
    index = PrefixIndex(60.0)
    index.insert(0, blocks, 0.0, capacity)
    assert index.match(blocks) == ({0: min(len(blocks), capacity)} if blocks else {})
    assert len(index) == min(len(blocks), capacity)


def a_chain(*lengths: int) -> tuple[int, ...]:
    """A chain that shares with another one the lengths that both begin with: a block tells its whole past."""
    blocks: list[int] = []
    for turn, length in enumerate(lengths):
        blocks += [hash((*lengths[:turn], turn, at)) for at in range(length)]
    return tuple(blocks)


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 300))
def test_a_long_match_is_short_by_less_than_a_stride(shared: int, first: int, second: int) -> None:
    index = PrefixIndex(60.0)
    index.insert(0, a_chain(shared, first), 0.0, ROOMY)
    again = (*a_chain(shared), *(-1 - block for block in a_chain(second)))
    depth = index.match(again).get(0, 0)
    assert shared - 8 < depth <= shared
    assert depth == shared or shared > 64


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300)), min_size=1, max_size=30), st.integers(1, 400))
def test_however_long_the_chains_a_slot_is_bounded_and_ends_empty(uses: list[tuple[int, int]], capacity: int) -> None:
    index = PrefixIndex(60.0)
    for now, (conversation, length) in enumerate(uses):
        chain = a_chain(conversation + 1, length)
        index.insert(0, chain, float(now), capacity)
        depth = index.match(chain).get(0, 0)
        assert min(len(chain), capacity) - 8 < depth <= min(len(chain), capacity)
        assert len(index) <= capacity
    index.expire(1000.0)
    assert len(index) == 0
    assert index.match(a_chain(uses[0][0] + 1, uses[0][1])) == {}


def test_taking_back_a_long_chain_leaves_what_another_one_shares() -> None:
    index = PrefixIndex(60.0)
    index.insert(0, a_chain(100, 200), 0.0, ROOMY)
    index.discard(0, a_chain(100, 200)[100:])
    assert index.match(a_chain(100, 200)) == {0: 96}
    index.insert(0, a_chain(500, 1), 1.0, ROOMY)
    index.insert(0, a_chain(400, 1), 2.0, ROOMY)
    assert index.match(a_chain(100, 200)) == {0: 96}, "what was taken back does not count against the bound"


def test_a_prefix_used_again_and_again_does_not_grow_what_is_kept_of_it() -> None:
    index = PrefixIndex(1e9)
    for now in range(1000):
        index.insert(0, a_chain(50, 0), float(now), 100)
    assert index._slots[0].touched <= 450
    assert index.match(a_chain(50)) == {0: 50}


def test_all_of_a_prompt_is_held_or_not() -> None:
    index = PrefixIndex(600.0)
    for count in (3, 64, 200):
        blocks = tuple(range(count * 1000, count * 1000 + count))
        assert not index.holds(1, blocks)
        index.insert(1, blocks, 0.0, 10_000)
        assert index.holds(1, blocks)
        assert not index.holds(2, blocks)
    assert not index.holds(1, (*range(3000, 3003), 9))
    assert index.holds(1, ())
