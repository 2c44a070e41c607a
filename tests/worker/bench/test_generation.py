"""The scenarios with a model, on a tiny one."""

import pytest
from headwater.worker.bench import memory
from headwater.worker.bench.registry import SCENARIOS
from headwater.worker.bench.scenario import BenchError, run_scenario

SMALL = {
    "unique": {"jobs": 4, "longest": 64, "new_tokens": 4},
    "shared-prefix": {"jobs": 4, "shared_tokens": 64, "new_tokens": 4},
    "nested-prefix": {"jobs": 4, "shared_tokens": 64, "group": 2, "group_tokens": 32},
    "samples": {"jobs": 2, "n": 3, "prompt_tokens": 64, "new_tokens": 4, "temperature": 0.0},
    "multi-turn": {"chats": 3, "turns": 2, "system_tokens": 64, "new_tokens": 4},
    "mixed": {"long_tokens": 256, "jobs": 2, "first_s": 0.0, "every_s": 0.01, "new_tokens": 4},
    "memory": {"jobs": 6, "prompt_tokens": 32, "new_tokens": 8, "rows": 2},
    "decode": {"rows": 3, "shared_tokens": 64, "steps": 3},
}


def report(name: str, model: str, **settings: object):
    scenario = SCENARIOS[name]
    asked = scenario.settings(model=model, **(SMALL[name] | settings))
    # quick would take the scenario's own small size, which is meant for a real model.
    return run_scenario(scenario, asked, repeat=1, measure_memory=False)


@pytest.mark.parametrize("name", SMALL)
def test_both_sides_give_the_same_text_and_count_alike(name, tiny_folder):
    found = report(name, tiny_folder)

    assert found.ratio["same_text"] == 1.0
    assert found.ours["generated_tokens"] == found.peers[0]["generated_tokens"]
    assert found.ours["peak_kv_bytes"] > 0


@pytest.mark.parametrize("name", ["shared-prefix", "nested-prefix"])
def test_we_compute_a_shared_prefix_once_and_the_peer_for_each(name, tiny_folder):
    found = report(name, tiny_folder)

    assert found.ratio["computed_over_unique"] == 1.0
    assert found.peers[0]["prompt_tokens_computed"] == found.ours["prompt_tokens"]


@pytest.mark.parametrize("kind", ["hybrid", "sliding", "recurrent"])
def test_a_random_model_of_each_kind_computes_a_shared_prefix_once(kind):
    found = report("shared-prefix", "", model_kind=kind, jobs=3, shared_tokens=48, new_tokens=2)

    assert found.settings["model_kind"] == kind
    assert found.ratio["computed_over_unique"] == 1.0
    assert found.ratio["same_text"] == 1.0


def test_an_unknown_kind_of_model_is_named_with_those_there_are():
    with pytest.raises(BenchError, match="choose one of hybrid, sliding, recurrent"):
        report("shared-prefix", "", model_kind="plain")


def test_the_prefix_is_longer_for_random_models_unless_said_otherwise():
    complete = SCENARIOS["shared-prefix"].complete
    settings = SCENARIOS["shared-prefix"].settings

    lengths = [
        complete(settings(model_kind=kind, shared_tokens=asked)).shared_tokens
        for kind, asked in (("", 0), ("hybrid", 0), ("hybrid", 7))
    ]
    assert lengths == [512, 1024, 7]


def test_every_choice_is_counted(tiny_folder):
    found = report("samples", tiny_folder, temperature=0.8)

    assert found.ours["generated_tokens"] == found.peers[0]["generated_tokens"] == 2 * 3 * 4
    assert found.ours["prompt_tokens"] == found.peers[0]["prompt_tokens_computed"] == 2 * 3 * 64
    assert found.ours["prompt_tokens_computed"] < 2 * 64 * 1.5


def test_a_chats_next_turn_continues_the_one_before(tiny_folder):
    found = report("multi-turn", tiny_folder)

    first, second = 64 + 32, 64 + 32 + 4 + 32
    assert found.ours["prompt_tokens"] == 3 * (first + second)
    assert found.ours["prompt_tokens_computed"] < found.peers[0]["prompt_tokens_computed"]


def test_rows_over_a_budget_keep_to_it(tiny_folder):
    found = report("memory", tiny_folder, jobs=12)

    assert found.ratio["peak_over_budget"] <= 1.1
    assert found.ratio["kv_bytes"] < 1.0


def test_each_side_has_its_peaks_from_a_process_of_its_own(tiny_folder):
    settings = {"model": tiny_folder, **SMALL["unique"]}
    for side in (memory.OURS, memory.PEER):
        found = memory.measure_apart("unique", settings, side)
        assert found["peak_rss_bytes"] > found["peak_kv_bytes"] > 0


def test_a_restarted_worker_computes_only_what_it_has_not_served(tiny_folder):
    scenario = SCENARIOS["restart"]
    asked = scenario.settings(model=tiny_folder, prompts=2, system_tokens=256)
    found = run_scenario(scenario, asked, repeat=1, measure_memory=False)

    assert found.ours["prompt_tokens_computed"] == 2 * 16
    assert found.peers[0]["prompt_tokens_computed"] == found.ours["prompt_tokens"] == 2 * 272
    assert found.ratio["ttft_warm_over_cold"] > 0
