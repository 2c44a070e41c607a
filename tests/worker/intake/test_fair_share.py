"""Which queue comes next: classes, aging, and namespaces that pay by the token."""

from collections import Counter

from headwater.worker.intake.fair_share import FairShare, QueueId


def _queue(priority: str, namespace: str) -> QueueId:
    queue = QueueId.parse(f"m.{priority}.{namespace}", "m")
    assert queue is not None
    return queue


def test_namespaces_get_the_same_number_of_tokens_however_large_their_jobs_are() -> None:
    large, small = _queue("normal", "large"), _queue("normal", "small")
    tokens: Counter[str] = Counter()
    share = FairShare(max_wait_s=1e9)
    for _ in range(1000):
        chosen = share.order([large, small], 0.0)[0]
        cost = 1000 if chosen is large else 10
        share.claimed(chosen, cost)
        tokens[chosen.namespace] += cost

    assert abs(tokens["large"] - tokens["small"]) <= 1000


def test_a_namespace_saves_nothing_up_while_it_has_no_work() -> None:
    busy, idler = _queue("normal", "busy"), _queue("normal", "idler")
    share = FairShare(max_wait_s=1e9)
    for _ in range(100):
        share.claimed(share.order([busy], 0.0)[0], 10)

    chosen = []
    for _ in range(20):
        chosen.append(share.order([busy, idler], 0.0)[0])
        share.claimed(chosen[-1], 10)

    assert chosen.count(busy) == chosen.count(idler)


def test_a_lower_class_comes_first_once_it_has_waited_too_long() -> None:
    high, low = _queue("high", "a"), _queue("low", "a")
    share = FairShare(max_wait_s=30)

    firsts = []
    for now in range(100):
        firsts.append(share.order([high, low], float(now))[0])
        share.claimed(firsts[-1], 1)

    assert [now for now, queue in enumerate(firsts) if queue is low] == [31, 63, 95]


def test_names_of_other_models_and_classes_are_no_queues_of_ours() -> None:
    assert QueueId.parse("other.normal.a", "m") is None
    assert QueueId.parse("m.urgent.a", "m") is None
    assert QueueId.parse("m.normal", "m") is None
