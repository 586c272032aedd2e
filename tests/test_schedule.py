"""The order of a block: every item once, after what it needs; starts early, dones late."""

from hypothesis import given
from hypothesis import strategies as st

from jax_hetccl.ordering.schedule import Done, Item, Kind, Run, Start, exchanges, schedule

BIG = dict(bucket_bytes=1 << 20, inflight_bytes=1 << 30)


def item(kind, *needs, nbytes=4, group="g"):
    return Item(kind, frozenset(needs), nbytes if kind is Kind.EXCHANGE else 0, group if kind is Kind.EXCHANGE else "")


@st.composite
def blocks(draw):
    items = []
    for i in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from([Kind.PLAIN, Kind.PLAIN, Kind.LIGHT, Kind.EXCHANGE, Kind.EXCHANGE, Kind.REGION]))
        needs = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ()
        items.append(item(kind, *needs, nbytes=draw(st.integers(1, 9)), group=draw(st.sampled_from("ab"))))
    return items


@given(blocks(), st.integers(1, 20), st.integers(1, 40))
def test_everything_runs_once_and_after_what_it_needs(items, bucket_bytes, inflight_bytes):
    steps = schedule(items, bucket_bytes=bucket_bytes, inflight_bytes=inflight_bytes)
    finished, started = set(), []
    for step in steps:
        match step:
            case Run(i):
                assert items[i].kind is not Kind.EXCHANGE
                assert items[i].needs <= finished
                assert i not in finished
                if items[i].kind is Kind.REGION:
                    assert not started, "an exchange is in flight across a region"
                finished.add(i)
            case Start(bucket):
                assert all(items[i].kind is Kind.EXCHANGE and items[i].needs <= finished for i in bucket)
                assert len({items[i].group for i in bucket}) == 1
                assert len(bucket) == 1 or sum(items[i].nbytes for i in bucket) <= bucket_bytes
                inflight = sum(items[i].nbytes for b in (*started, bucket) for i in b)
                assert inflight <= inflight_bytes or sum(map(len, (*started, bucket))) == 1
                started.append(bucket)
            case Done(bucket):
                assert started.pop(0) == bucket, "finished in the order of the starts"
                finished.update(bucket)
    assert finished == set(range(len(items))) and not started


@given(blocks())
def test_the_order_does_not_depend_on_light_operations(items):
    """A cluster of one device has no local collectives in front of its exchanges; the order must be the same."""
    without, number, through = [], {}, {}
    for i, it in enumerate(items):
        needs = set()
        for n in it.needs:  # a light item is replaced by what it needs
            needs |= {number[n]} if n in number else through[n]
        if it.kind is Kind.LIGHT:
            through[i] = needs
        else:
            number[i] = len(without)
            without.append(Item(it.kind, frozenset(needs), it.nbytes, it.group))
    order = [number[i] for i in exchanges(schedule(items, **BIG))]
    assert order == exchanges(schedule(without, **BIG))


def test_gradients_listed_at_the_end_start_inside_the_backward_pass():
    # grad 2 is produced first (layer 2's), grad 1 later; the program lists their exchanges in layer order at its end.
    items = [
        item(Kind.PLAIN),  # 0: gradient of layer 2
        item(Kind.PLAIN, 0),  # 1: backward of layer 1
        item(Kind.PLAIN, 1),  # 2: gradient of layer 1
        item(Kind.LIGHT, 2),  # 3: local reduce of layer 1
        item(Kind.EXCHANGE, 3),  # 4
        item(Kind.LIGHT, 0),  # 5: local reduce of layer 2
        item(Kind.EXCHANGE, 5),  # 6
    ]
    steps = schedule(items, bucket_bytes=4, inflight_bytes=1 << 30)
    assert steps == [Run(0), Run(5), Start((6,)), Run(1), Run(2), Run(3), Start((4,)), Done((6,)), Done((4,))]


def test_a_pytree_travels_in_one_bucket():
    items = [item(Kind.PLAIN), *(item(Kind.EXCHANGE, 0) for _ in range(5)), item(Kind.PLAIN, 1, 5)]
    steps = schedule(items, **BIG)
    assert steps == [Run(0), Start((1, 2, 3, 4, 5)), Done((1, 2, 3, 4, 5)), Run(6)]


def test_two_phases_of_many_leaves_take_two_rounds():
    leaves = []
    for _ in range(4):
        n = len(leaves)
        leaves += [item(Kind.EXCHANGE), item(Kind.PLAIN, n), item(Kind.EXCHANGE, n + 1), item(Kind.PLAIN, n + 2)]
    starts = [s for s in schedule(leaves, **BIG) if isinstance(s, Start)]
    assert [s.bucket for s in starts] == [(0, 4, 8, 12), (2, 6, 10, 14)]


def test_groups_do_not_share_a_bucket():
    items = [item(Kind.EXCHANGE, group="a"), item(Kind.EXCHANGE, group="b")]
    assert [s for s in schedule(items, **BIG) if isinstance(s, Start)] == [Start((0,)), Start((1,))]


@st.composite
def blocks_with_streams(draw):
    return [
        Item(i.kind, i.needs, i.nbytes, i.group, stream=i.kind is Kind.EXCHANGE and draw(st.booleans()))
        for i in draw(blocks())
    ]


@given(blocks_with_streams(), st.integers(1, 20), st.integers(1, 40))
def test_streams_keep_their_place(items, bucket_bytes, inflight_bytes):
    """Alone, and in program order among themselves and the regions, whatever else is moved."""
    steps = schedule(items, bucket_bytes=bucket_bytes, inflight_bytes=inflight_bytes)
    starts = [step.bucket for step in steps if isinstance(step, Start)]
    assert all(len(bucket) == 1 for bucket in starts if any(items[i].stream for i in bucket))
    fixed = [step.bucket[0] if isinstance(step, Start) else step.item for step in steps if not isinstance(step, Done)]
    fixed = [i for i in fixed if items[i].stream or items[i].kind is Kind.REGION]
    assert fixed == sorted(fixed)
    finished = set()
    for step in steps:
        if isinstance(step, Done):
            finished.update(step.bucket)
        elif isinstance(step, Run):
            assert items[step.item].needs <= finished
            finished.add(step.item)
        else:
            assert all(items[i].needs <= finished for i in step.bucket)


def test_a_send_does_not_wait_in_front_of_a_receive():
    """However little may be in flight: the peer may be doing the same."""
    items = [Item(Kind.EXCHANGE, nbytes=9, stream=True), Item(Kind.EXCHANGE, nbytes=9, stream=True)]
    steps = schedule(items, bucket_bytes=1, inflight_bytes=1)
    assert steps == [Start((0,)), Start((1,)), Done((0,)), Done((1,))]
