"""Rows with sliding windows see what they should, and compute nothing of what they don't."""

import random

import mlx.core as mx
import pytest
from headwater.worker.engine.segments import KVSegment, LayerKV
from headwater.worker.engine.shared_kv import SharedPrefixRunner
from headwater.worker.engine.shared_kv.batch import LayerCache, OwnMask
from headwater.worker.engine.shared_kv.kinds import ModelLayers
from headwater.worker.engine.shared_kv.layout import find_spans
from headwater.worker.engine.shared_kv.page_views import PageViews
from headwater.worker.engine.shared_kv.parts import Part, together, weights_of, with_sinks
from headwater.worker.engine.shared_kv.prefill import PrefillBatch
from headwater.worker.engine.shared_kv.windows import views
from mlx import nn
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from tests.exactness.reference import assert_logits_close, logits_alone
from tests.exactness.workload import sequence
from tests.tiny_models import VOCABULARY_SIZE, WINDOW, tiny_model


def segment(num_tokens: int) -> KVSegment:
    return KVSegment((LayerKV(mx.zeros((1, 2, num_tokens, 4)), mx.zeros((1, 2, num_tokens, 4))),))


def seen(view, starts, num_new, window):
    """Say naively which of the view's keys each query of each row sees."""
    span = view.span
    first = span.first_token + view.first_token
    keys = range(first, span.first_token + span.segment.num_tokens)
    return [
        [
            [starts[row] + query - window < key for key in keys]
            for query in range(max(num_new[span.first_row : span.last_row]))
        ]
        for row in range(span.first_row, span.last_row)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_views_hide_exactly_what_is_out_of_the_window(seed) -> None:
    rng = random.Random(seed)
    path = [segment(rng.randint(1, 300)) for _ in range(3)]
    prefixes = [path[: rng.randint(0, 3)] for _ in range(4)]
    starts = [sum(s.num_tokens for s in prefix) + rng.randint(0, 200) for prefix in prefixes]
    num_new = [rng.randint(1, 5)] * 4
    window = rng.choice([1, 8, 100, 1000])
    spans = find_spans(prefixes)

    shown = {
        id(view.span): view for depth in views([spans], starts, num_new, window) for view in depth
    }

    for span in spans:
        view = shown.get(id(span))
        rows = range(span.first_row, span.last_row)
        last_hidden = min(starts[row] for row in rows) - window
        if view is None:
            assert span.first_token + span.segment.num_tokens - 1 <= last_hidden
            continue
        assert span.first_token + view.first_token - 1 <= max(last_hidden, span.first_token - 1)
        expected = seen(view, starts, num_new, window)
        if view.mask is None:
            assert all(all(keys) for row in expected for keys in row)
        else:
            assert view.mask[:, 0].tolist() == expected


def test_a_segment_out_of_every_rows_window_is_not_computed() -> None:
    model = tiny_model("gemma3_text")
    runner = SharedPrefixRunner(model)
    # Shorter segments would be read as one.
    text = [index % VOCABULARY_SIZE for index in range(420)]
    row = sequence(text)
    runner.attach(row, ())
    runner.prefill([row], [text[:280]])
    prefix = [runner.extract(row, 0, 140), runner.extract(row, 140, 280)]
    taker = sequence([*text, 1])
    runner.attach(taker, prefix)
    runner.prefill([taker], [text[280:]])

    batch = PrefillBatch([runner._rows[taker]], [1], ModelLayers.of(model))
    of_window, of_all = batch.layers[0], batch.layers[1]

    ((seen,),) = of_window.shared(WINDOW)
    assert seen.layer.keys.shape[2] < 64
    assert sum(len(depth) for depth in of_all.shared(None)) == 3
    assert_logits_close(
        runner.decode([taker], mx.array([1]))[0], logits_alone(model, [*text, 1])[-1]
    )


def test_pages_out_of_the_window_are_left_out_and_others_masked() -> None:
    model = tiny_model("gemma3_text")
    model.args.sliding_window = model.model.window_size = 80
    runner = SharedPrefixRunner(model)
    rng = random.Random(0)
    text = [rng.randrange(VOCABULARY_SIZE) for _ in range(210)]
    row = sequence(text)
    runner.attach(row, ())
    runner.prefill([row], [text[:200]])
    for token in text[200:]:
        logits = runner.decode([row], mx.array([token]))
    group = runner._group
    step = group.step

    windowed = PageViews(runner._pool, group.rows).layer(0, 80, step)
    whole = PageViews(runner._pool, group.rows).layer(0, None, step)

    (few,), (many,) = windowed, whole
    assert few.entries.of_row.size < many.entries.of_row.size
    assert many.mask is None
    assert 0 < int(mx.sum(few.mask[0])) < few.mask[0].size
    assert_logits_close(logits[0], logits_alone(model, text)[-1])


def test_the_narrower_of_a_layers_and_its_masks_window_counts() -> None:
    class Batch:
        class step:  # noqa: N801  # stands for an attribute
            offset = mx.array([0])

    cache = LayerCache(Batch, 0, 8)

    assert cache.window(OwnMask(None)) == 8
    assert cache.window(OwnMask(4)) == 4
    assert cache.window(OwnMask(16)) == 8
    assert cache.window(cache.make_mask(1)) == 8
    assert LayerCache(Batch, 0, None).window(OwnMask(None)) is None


def test_sinks_take_their_share_once_however_many_parts_there_are() -> None:
    mx.random.seed(0)
    queries, keys, values = (mx.random.normal((1, 4, num, 8)) for num in (1, 12, 12))
    sinks = mx.array([0.5, -1.0, 2.0, 0.0])
    expected = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=1.0, mask=None, sinks=sinks
    )

    parts = []
    for at in (slice(0, 5), slice(5, 6), slice(6, 12)):
        weights, log_weight = weights_of(queries @ keys[:, :, at].swapaxes(-1, -2))
        parts.append(Part(weights @ values[:, :, at], log_weight))
    actual = with_sinks(together(parts), sinks)

    assert mx.allclose(actual, expected, atol=1e-5)


class OfCaches(nn.Module):
    def __init__(self, *caches) -> None:
        super().__init__()
        self._caches = caches

    def make_cache(self):
        return list(self._caches)


def test_lists_of_caches_are_laid_out_and_put_together_again() -> None:
    model = OfCaches(
        CacheList(ArraysCache(2), KVCache()),
        RotatingKVCache(16),
        CacheList(KVCache(), ArraysCache(1)),
    )

    layers = ModelLayers.of(model)
    arranged = layers.arrange(["full", "window", "other"], ["states", "state"])

    assert layers.attention == {1: None, 2: 16, 3: None}
    assert layers.recurrent == {0: 2, 4: 1}
    assert arranged[0].caches == ("states", "full")
    assert arranged[1] == "window"
    assert arranged[2].caches == ("other", "state")


@pytest.mark.parametrize("cache", [RotatingKVCache(8, keep=4), type("Bent", (KVCache,), {})()])
def test_caches_that_bend_the_rules_are_refused(cache) -> None:
    with pytest.raises(TypeError, match="can't be shared"):
        ModelLayers.of(OfCaches(KVCache(), cache))
