"""Attention over the segments of one depth, however it is cut into passes."""

import mlx.core as mx
import pytest
from headwater.worker.engine.segments import LayerKV
from headwater.worker.engine.shared_kv import depths
from headwater.worker.engine.shared_kv.batch import LayerSpan

KV_HEADS, GROUP, LENGTH, DIM = 3, 2, 4, 8


def normal(*shape: int, seed: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed))


def span(num_tokens: int, first: int, last: int, *, is_masked: bool = False) -> LayerSpan:
    layer = LayerKV(*(normal(1, KV_HEADS, num_tokens, DIM, seed=num_tokens + i) for i in range(2)))
    shape = (last - first, 1, LENGTH, num_tokens)
    mask = mx.random.uniform(shape=shape, key=mx.random.key(3)) > 0.3
    # What a query sees none of is no question here.
    mask[..., 0] = True
    return LayerSpan(layer, first, last, mask if is_masked else None)


def queries_of(num_rows: int) -> mx.array:
    return normal(num_rows, KV_HEADS * GROUP, LENGTH, DIM, seed=1)


def expected(queries: mx.array, depth: list[LayerSpan]) -> list[tuple[slice, mx.array, mx.array]]:
    """Return rows, output and log weight of each span, computed without a trick."""
    found = []
    for each in depth:
        rows = slice(each.first_row, each.last_row)
        keys, values = (mx.repeat(array, GROUP, axis=1) for array in each.layer)
        scores = queries[rows] @ keys.swapaxes(-1, -2)
        if each.mask is not None:
            scores = mx.where(each.mask, scores, -mx.inf)
        log_weight = mx.logsumexp(scores, axis=-1, keepdims=True)
        found.append((rows, mx.softmax(scores, axis=-1) @ values, log_weight))
    return found


def check(queries: mx.array, depth: list[LayerSpan]) -> None:
    part = depths.by_rows(queries, depth, KV_HEADS)

    assert part.output.shape == queries.shape
    assert part.log_weight.shape == (*queries.shape[:3], 1)
    is_reached = [False] * queries.shape[0]
    for rows, output, log_weight in expected(queries, depth):
        assert mx.allclose(part.output[rows], output, atol=1e-5)
        assert mx.allclose(part.log_weight[rows], log_weight, atol=1e-5)
        is_reached[rows] = [True] * (rows.stop - rows.start)
    for row, reached in enumerate(is_reached):
        assert reached or mx.all(mx.exp(part.log_weight[row]) == 0).item()


@pytest.mark.parametrize("max_scores", [1 << 18, 0])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_segment_of_many_rows(
    is_masked: bool, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU many scores are computed a head at a time."""
    monkeypatch.setattr(depths, "_MAX_SCORES", max_scores)

    check(queries_of(5), [span(20, 0, 5, is_masked=is_masked)])


@pytest.mark.parametrize("max_scores", [1 << 18, 300, 0])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(
    "ends",
    [
        [(20, 0, 2), (20, 2, 5)],
        [(16, 0, 1), (20, 1, 4), (18, 4, 5), (90, 5, 7), (80, 7, 8)],
        [(20, 1, 3), (21, 4, 5), (5, 5, 6)],
    ],
)
def test_segments_of_one_depth(
    ends: list[tuple[int, int, int]],
    is_masked: bool,
    max_scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those beside each other, of other lengths, with rows between that have none."""
    monkeypatch.setattr(depths, "_MAX_SCORES", max_scores)
    depth = [span(*each, is_masked=is_masked and index % 2 == 0) for index, each in enumerate(ends)]

    check(queries_of(9), depth)


@pytest.mark.parametrize(
    ("ends", "num_runs"),
    [
        ([(128, 0, 4), (128, 4, 8), (128, 8, 12)], 1),
        ([(128, 0, 4), (100, 4, 8), (90, 8, 12)], 1),
        ([(128, 0, 4), (20, 4, 8)], 2),
        ([(128, 0, 4), (128, 5, 8)], 2),
        ([(9000, 0, 4), (9000, 4, 8)], 2),
    ],
)
def test_what_costs_less_as_one_block_is_one(
    ends: list[tuple[int, int, int]], num_runs: int
) -> None:
    depth = [span(*each) for each in ends]

    runs = depths._runs(depth, KV_HEADS * GROUP)

    assert [each for run in runs for each in run] == depth
    assert len(runs) == num_runs


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("ends", [[(20, 0, 9)], [(16, 0, 1), (20, 1, 4)], [(20, 3, 5), (18, 5, 8)]])
def test_a_run_is_scored_and_weighed_row_by_row(
    ends: list[tuple[int, int, int]], is_masked: bool
) -> None:
    """Rows without a segment there get scores that weigh nothing beside any other."""
    queries = queries_of(9)
    run = [span(*each, is_masked=is_masked) for each in ends]
    by_head = queries.reshape(9, KV_HEADS, -1, DIM).swapaxes(0, 1)

    scores = depths.scores_of_run(by_head, run)
    output = depths.values_of_run(mx.softmax(scores, axis=-1), run)

    assert output.shape == (9, KV_HEADS, GROUP * LENGTH, DIM)
    is_reached = [False] * 9
    for rows, whole, _ in expected(queries, run):
        num_rows = rows.stop - rows.start
        assert mx.allclose(output[rows].reshape(num_rows, -1, LENGTH, DIM), whole, atol=1e-5)
        is_reached[rows] = [True] * num_rows
    for row, reached in enumerate(is_reached):
        assert reached or mx.all(scores[row] == mx.finfo(mx.float32).min).item()


def test_long_depths_and_those_in_pieces_are_weighed_apart() -> None:
    short, long = [span(20, 0, 5)], [span(9000, 0, 5)]
    pieces = [span(90, 0, 1), span(20, 1, 5)]
    other = [span(30, 0, 3)]

    together, apart = depths.split_by_size([short, long, pieces, other], 6, 5, num_own=64)

    assert together == [short, other]
    assert apart == [long, pieces]
    assert depths.split_by_size([short, other], 6, 5, num_own=8710) == ([short], [other])
