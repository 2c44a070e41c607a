"""The contestants of the scenarios that generate: our loop, and mlx-lm's batch generator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headwater.schemas import GenerationJob, SamplingParams
from mlx_lm.models.cache import LRUPromptCache

from ..assembly import LoopSettings
from .batch_scenarios import (
    NestedPrefixSettings,
    SamplesSettings,
    SharedPrefixSettings,
    UniqueSettings,
)
from .chat_scenarios import MixedSettings, MultiTurnSettings
from .environment import version
from .random_kinds import random_lab
from .record import Record
from .report import Figures
from .scenario import Contest, Peer
from .sides import Lab, run_mlx_lm, run_ours
from .workload import ALIAS, Arrivals, Prompts, make_job

_PEER_CACHE_ENTRIES = 64
_LONG = "long"


class _Limits(Protocol):
    """The flags that all these scenarios have."""

    @property
    def batch(self) -> int: ...

    @property
    def target_itl_ms(self) -> float: ...


@dataclass(frozen=True)
class _Work:
    """What both sides do."""

    lab: Lab
    arrivals: Callable[[], Arrivals]
    limits: _Limits
    temperature: float = 0.0
    uses_prompt_cache: bool = False
    """Whether the peer gets mlx-lm's prompt cache."""
    is_asked: Callable[[str], bool] = lambda _: True
    """Whose TTFT is asked for, by job id."""


def prepare_unique(settings: UniqueSettings) -> Contest:
    """Ragged prompts that share nothing."""
    lab = Lab(settings.model)
    prompts = Prompts(lab.loaded.vocab_size)
    lengths = [prompts.length(settings.shortest, settings.longest) for _ in range(settings.jobs)]
    return _batch_contest(
        lab, [prompts.tokens(length) for length in lengths], settings.new_tokens, settings
    )


def prepare_shared_prefix(settings: SharedPrefixSettings) -> Contest:
    """One prefix for all."""
    lab = random_lab(settings.model_kind) if settings.model_kind else Lab(settings.model)
    prompts = Prompts(lab.loaded.vocab_size)
    shared = prompts.tokens(settings.shared_tokens)
    return _batch_contest(
        lab,
        [shared + prompts.tokens(settings.own_tokens) for _ in range(settings.jobs)],
        settings.new_tokens,
        settings,
    )


def prepare_nested_prefix(settings: NestedPrefixSettings) -> Contest:
    """One prefix for all, and behind it another for each group."""
    lab = Lab(settings.model)
    prompts = Prompts(lab.loaded.vocab_size)
    shared = prompts.tokens(settings.shared_tokens)
    num_groups = -(-settings.jobs // settings.group)
    groups = [shared + prompts.tokens(settings.group_tokens) for _ in range(num_groups)]
    # Neighbours in the queue belong to different groups, as they come in real life.
    return _batch_contest(
        lab,
        [
            groups[index % num_groups] + prompts.tokens(settings.own_tokens)
            for index in range(settings.jobs)
        ],
        settings.new_tokens,
        settings,
    )


def prepare_samples(settings: SamplesSettings) -> Contest:
    """Several choices of each prompt; the peer gets the prompt once for each choice."""
    lab = Lab(settings.model)
    prompts = Prompts(lab.loaded.vocab_size)
    jobs = []
    for index in range(settings.jobs):
        sampling = SamplingParams(n=settings.n, temperature=settings.temperature, seed=index)
        prompt = prompts.tokens(settings.prompt_tokens)
        jobs.append((0.0, make_job(f"job-{index}", prompt, settings.new_tokens, sampling)))
    work = _Work(lab, lambda: Arrivals(jobs), settings, temperature=settings.temperature)
    return _contest(work)


def prepare_multi_turn(settings: MultiTurnSettings) -> Contest:
    """Chats; what the model says in a turn is a part of the next turn's prompt."""
    lab = Lab(settings.model)

    def arrivals() -> Arrivals:
        system = Prompts(lab.loaded.vocab_size).tokens(settings.system_tokens)
        users = [Prompts(lab.loaded.vocab_size, seed + 1) for seed in range(settings.chats)]

        def turn(chat: int, number: int, before: tuple[int, ...]) -> GenerationJob:
            prompt = before + users[chat].tokens(settings.user_tokens)
            return make_job(f"chat-{chat}-{number}", prompt, settings.new_tokens)

        def follow_up(job: GenerationJob, token_ids: list[int]) -> GenerationJob | None:
            _, chat, number = job.job_id.split("-")
            if int(number) + 1 == settings.turns:
                return None
            return turn(int(chat), int(number) + 1, job.prompt_token_ids + tuple(token_ids))

        first = [(0.0, turn(chat, 0, system)) for chat in range(settings.chats)]
        return Arrivals(first, follow_up)

    return _contest(_Work(lab, arrivals, settings, uses_prompt_cache=True))


def prepare_mixed(settings: MixedSettings) -> Contest:
    """A long prompt, and short jobs that come while it is being computed."""
    lab = Lab(settings.model)
    prompts = Prompts(lab.loaded.vocab_size)
    jobs = [(0.0, make_job(_LONG, prompts.tokens(settings.long_tokens), settings.new_tokens))]
    for index in range(settings.jobs):
        prompt = prompts.tokens(settings.short_tokens)
        arrival_s = settings.first_s + index * settings.every_s
        jobs.append((arrival_s, make_job(f"short-{index}", prompt, settings.new_tokens)))
    work = _Work(
        lab,
        lambda: Arrivals(jobs),
        settings,
        is_asked=lambda job_id: job_id != _LONG,
    )
    return _contest(work)


def _batch_contest(
    lab: Lab, prompts: list[tuple[int, ...]], num_new_tokens: int, limits: _Limits
) -> Contest:
    jobs = [
        (0.0, make_job(f"job-{index}", prompt, num_new_tokens))
        for index, prompt in enumerate(prompts)
    ]
    return _contest(_Work(lab, lambda: Arrivals(jobs), limits))


def _contest(work: _Work) -> Contest:
    last: dict[str, Record] = {}

    def ours() -> Figures:
        settings = LoopSettings(
            alias=ALIAS, max_batch=work.limits.batch, target_itl_ms=work.limits.target_itl_ms
        )
        last["ours"] = run_ours(work.lab, work.arrivals(), settings)
        return last["ours"].figures(work.is_asked)

    def peer() -> Figures:
        cache = LRUPromptCache(max_size=_PEER_CACHE_ENTRIES) if work.uses_prompt_cache else None
        last["peer"] = run_mlx_lm(
            work.lab,
            work.arrivals(),
            work.limits.batch,
            prompt_cache=cache,
            temperature=work.temperature,
        )
        return last["peer"].figures(work.is_asked)

    def ratio(ours: Figures, peer: Figures) -> Figures:
        ratios = speed_ratios(ours, peer)
        if work.temperature == 0:
            ratios["same_text"] = same_text(last["ours"], last["peer"])
        return ratios

    name = "mlx-lm BatchGenerator" + (" + LRUPromptCache" if work.uses_prompt_cache else "")
    return Contest(ours, (Peer(name, version("mlx-lm") or "", peer),), ratio)


def speed_ratios(ours: Figures, peer: Figures) -> Figures:
    """Return what a reader compares first."""
    return {
        "speedup": peer["wall_s"] / ours["wall_s"],
        "ttft_p99": ours["ttft_p99_ms"] / peer["ttft_p99_ms"],
        "kv_bytes": ours["peak_kv_bytes"] / peer["peak_kv_bytes"],
        "computed_over_unique": ours["prompt_tokens_computed"] / ours["prompt_tokens_unique"],
    }


def same_text(ours: Record, peer: Record) -> float:
    """Return the share of jobs that got the same tokens from both; near ties may differ."""
    same = [ours.tokens[job_id] == tokens for job_id, tokens in peer.tokens.items()]
    return sum(same) / len(same)
