"""Completions x0 ~ p(x0 | x_t) of noised proposals: packed into full batches, shared by processes, kept if killed.

Shape legend: N proposals of this process, P jobs a proposal, A active rows, R rewards, K clock points; ``...`` is data.

All completions of a proposal ride on Brownian motions W in the clock snr = (alpha / sigma)^2, in both directions:
x_t of the forward process is (sigma^2 / alpha) (snr x0 + W(snr)), and a completion goes on along the same W (see
`flow.posterior_steps`). Every level by itself is sampled correctly, but neighbouring levels differ only by what the
policy adds between them, so the gains, their differences, lose most of their noise.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recast_lightning.credit.artefact import delete_artefact, load_artefact, save_artefact
from recast_lightning.credit.plan import Plan
from recast_lightning.flow.noising import Velocity, velocity_to_x0
from recast_lightning.seeds import noise as keyed_noise

_KIND = "unfinished profile"

Score = Callable[[Tensor, Tensor], Tensor]
"""``score(x0 [B, ...], index [B]) -> [R, B]``."""


@dataclass(frozen=True)
class _State:
    """Everything that a killed run needs to go on."""

    next_job: Tensor  # number of the first job that has not begun
    scores: Tensor  # [R, N P]
    job: Tensor  # [A]
    step: Tensor  # [A], calls made so far
    x: Tensor  # [A, ...]
    before: Tensor  # [A, ...], x0_hat of the call before
    done_job: Tensor  # finished, not scored yet
    done_x0: Tensor


class Completions:
    """Scores the completions that a plan takes of this process's share of the proposals.

    A job is one completion, or a proposal as it is. Jobs enter the batch as others leave it, so network calls are
    full until the jobs run out.

    Args:
        velocity: The policy's; ``index`` is the row of ``proposals``.
        proposals: Of all processes, [all N, ...].
        own: Rows of ``proposals`` that this process takes, [N].
        plan: See `make_plan`.
        score: Scores clean data.
        num_rewards: R.
        seed: Keys all noise, together with the row of the proposal.
        fresh: Whether each completion has a noisy state of its own, in antithetic pairs (order 2, where the mean over
            both is all that counts); else all completions of a level start from one x_t, for nested estimates.
        batch_size: Rows of one network call, and of one call of the rewards.
    """

    def __init__(
        self,
        velocity: Velocity,
        proposals: Tensor,
        own: Tensor,
        plan: Plan,
        score: Score,
        num_rewards: int,
        *,
        seed: int,
        fresh: bool,
        batch_size: int,
    ) -> None:
        self.velocity, self.proposals, self.own, self.plan, self.score = velocity, proposals, own, plan, score
        self.seed, self.fresh, self.batch_size = seed, fresh, batch_size
        self.device, self.dtype = proposals.device, torch.promote_types(proposals.dtype, torch.float32)
        longest = max(plan.completions)
        self.jobs = [(0, -1)] + [  # (completion, place of its level in the plan), long ones first; -1: no level, as is
            (j, i) for j in range(longest) for i in reversed(range(len(plan.levels))) if plan.completions[i] > j
        ]
        self.num_paths = (longest + 1) // 2 if fresh else longest
        self.completion, self.level = torch.tensor(self.jobs).T
        self.calls = torch.tensor([*plan.calls, 0])  # of level -1: none
        self.pool, self.kept = self._ring(1), range(0)  # noise of the proposals in work
        total, shape = len(own) * len(self.jobs), proposals.shape[1:]
        integers = torch.zeros(0, dtype=torch.long)
        empty = torch.zeros(0, *shape, device=self.device, dtype=self.dtype)
        scores = torch.full((num_rewards, total), torch.nan, dtype=torch.float64)
        self.state = _State(torch.tensor(0), scores, integers, integers, empty, empty, integers, empty)
        self.network_calls = 0

    def run(
        self,
        progress: Callable[[int], None],
        *,
        keep: "Keeper | None" = None,
        any_busy: Callable[[bool], bool] = bool,
    ) -> Tensor:
        """Scores of all jobs, [R, N, P], the last axis in the order of ``jobs``.

        Args:
            progress: Called with the rows evaluated so far by this process.
            keep: Where to keep what has been done, and to find it.
            any_busy: Whether any process has work, given whether this one has. A process without work calls the
                network along, as sharded models need.
        """
        if keep is not None:
            self.state = keep.restore(self.state, self.device)
            self._paths(self.state.job)
        try:
            while True:
                self._fill()
                busy = len(self.state.job) > 0
                if not any_busy(busy):
                    break
                if busy:
                    self._advance()
                    progress(self.network_calls)
                    if keep is not None:
                        keep.save(self.state)
                else:
                    self._idle_call()
            self._score(everything=True)
        finally:
            if keep is not None:
                keep.save(self.state, now=True)
        return self.state.scores.view(len(self.state.scores), len(self.own), len(self.jobs))

    @torch.no_grad()
    def _idle_call(self) -> None:
        """A call whose result nobody needs."""
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        self.velocity(self.proposals[:1].to(self.dtype), torch.ones(1, device=self.device, dtype=self.dtype), first)

    def by_level(self, scores: Tensor) -> list[Tensor]:
        """Scores [R, N, J] of level 0 and of each measured level, from those of all jobs [R, N, P]."""
        return [scores[:, :, torch.where(self.level == i)[0]] for i in range(-1, len(self.plan.levels))]

    def _fill(self) -> None:
        """Lets the next jobs into the batch."""
        count = len(self.jobs)
        while len(self.state.job) < self.batch_size and self.state.next_job < self.state.scores.shape[1]:
            state, begin = self.state, int(self.state.next_job)
            new = torch.arange(begin, min(begin + self.batch_size - len(state.job), state.scores.shape[1]))
            proposals = self.proposals[self.own[new // count].to(self.device)].to(self.dtype)
            level = self.level[new % count]
            clean, noisy = level < 0, torch.where(level >= 0)[0]
            x0 = proposals[noisy.to(self.device)]
            job = torch.cat([state.job, new[noisy]])
            self._paths(job)
            sigma = self._shaped(self.plan.start[level[noisy]])
            noise = self._noise(new[noisy], self.plan.place[level[noisy], 0])
            self.state = replace(
                state,
                next_job=state.next_job + len(new),
                job=job,
                step=torch.cat([state.step, torch.zeros_like(noisy)]),
                x=torch.cat([state.x, (1 - sigma) * x0 + sigma * noise]),
                before=torch.cat([state.before, torch.zeros_like(x0)]),
                done_job=torch.cat([state.done_job, new[clean]]),
                done_x0=torch.cat([state.done_x0, proposals[clean.to(self.device)]]),
            )
            self._score()

    @torch.no_grad()
    def _advance(self) -> None:
        """One network call and one step of every row; those that arrive leave the batch."""
        state, plan = self.state, self.plan
        level = self.level[state.job % len(self.jobs)]
        index = self.own[state.job // len(self.jobs)].to(self.device)
        sigma = plan.sigmas[level, state.step].to(self.device, self.dtype)
        x0_hat = velocity_to_x0(state.x, self.velocity(state.x, sigma, index).to(self.dtype), sigma)
        self.network_calls += len(index)
        arrived = state.step + 1 == self.calls[level]
        stay, leave = torch.where(~arrived)[0], arrived.to(self.device)
        on, job, step, level = stay.to(self.device), state.job[stay], state.step[stay], level[stay]
        keep, pull, slope, spread = self._shaped(plan.coefficients[level, step]).unbind(-1)
        extrapolated = x0_hat[on] + slope * (x0_hat[on] - state.before[on])
        noise = self._noise(job, plan.place[level, step + 1], plan.place[level, step])
        self.state = replace(
            state,
            job=job,
            step=step + 1,
            x=keep * state.x[on] + pull * extrapolated + spread * noise,
            before=x0_hat[on],
            done_job=torch.cat([state.done_job, state.job[arrived]]),
            done_x0=torch.cat([state.done_x0, x0_hat[leave]]),
        )
        self._score()

    def _score(self, *, everything: bool = False) -> None:
        """Scores what has arrived, in full batches."""
        while len(self.state.done_job) >= self.batch_size or (everything and len(self.state.done_job)):
            state = self.state
            job, x0 = state.done_job[: self.batch_size], state.done_x0[: self.batch_size]
            state.scores[:, job] = self.score(x0, self.own[job // len(self.jobs)].to(self.device))
            self.state = replace(state, done_job=state.done_job[len(job) :], done_x0=state.done_x0[len(job) :])

    def _noise(self, job: Tensor, place: Tensor, since: Tensor | None = None) -> Tensor:
        """Noise of rows [A, ...]: W(place) - W(since) of each job's path, or of its start: W(place) / sqrt(snr)."""
        completion = self.completion[job % len(self.jobs)]
        sign = self._shaped(1.0 - 2.0 * (completion % 2)) if self.fresh else 1.0
        path = completion // 2 if self.fresh else completion if since is not None else torch.zeros_like(completion)
        at = (job // len(self.jobs) % len(self.pool)).to(self.device), path.to(self.device)
        if since is not None:
            return sign * (self.pool[(*at, place.to(self.device) + 1)] - self.pool[(*at, since.to(self.device) + 1)])
        snr = self.plan.clock[place]
        rows = torch.where(snr > 0, place + 1, 0).to(self.device)
        return sign * self.pool[(*at, rows)] / self._shaped(torch.where(snr > 0, snr, 1.0).sqrt())

    def _paths(self, job: Tensor) -> None:
        """Has the noise of the jobs' proposals at hand: a ring that grows, and forgets those that are through."""
        if not len(job):
            return
        first, last = (int(n) // len(self.jobs) for n in (job.min(), job.max()))
        have = self.kept
        if last - first >= len(self.pool):
            have = range(0)
            self.pool = self._ring(2 * (last - first + 1))
        for n in range(first, last + 1):
            if n not in have:
                self.pool[n % len(self.pool)] = self._path(int(self.own[n])).to(self.device)
        self.kept = range(first, last + 1)

    def _ring(self, size: int) -> Tensor:
        shape = (size, self.num_paths, len(self.plan.clock) + 1, *self.proposals.shape[1:])
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def _path(self, index: int) -> Tensor:
        """Brownian motions of a proposal, [paths, K + 1, ...]: the noise of a start at snr 0, then W(clock)."""
        clock, shape = self.plan.clock, self.proposals.shape[1:]
        z = keyed_noise((len(clock), *shape), [(self.seed, "path", index, k) for k in range(self.num_paths)])
        motion = (z[:, 1:].to(self.dtype) * self._shaped(clock.diff().sqrt()).to("cpu")).cumsum(1)
        return torch.cat([z[:, :1].to(self.dtype), torch.zeros_like(motion[:, :1]), motion], 1)

    def _shaped(self, values: Tensor) -> Tensor:
        """[A, *rest] on the data's device, with the data's axes put between: [A, 1, ..., *rest]."""
        axes = [1] * (self.proposals.ndim - 1)
        return values.to(self.device, self.dtype).view(len(values), *axes, *values.shape[1:])


class Keeper:
    """Keeps the state of `Completions` in a file, so that a killed profile goes on with nothing to do again.

    Saving takes at most a twentieth of the time; when Python stops by an exception or the end, the last state is kept.

    Args:
        path: Of the file, without a suffix.
        settings: What must be the same for the file to serve, JSON-able.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.settings = path, settings
        self.spent, self.last = 0.0, time.monotonic()

    def restore(self, state: _State, device: torch.device) -> _State:
        """What is on file, or ``state`` if there is no file.

        Raises:
            ValueError: If it is of other settings.
        """
        if not self.path.with_name(self.path.name + ".safetensors").is_file():
            return state
        tensors, settings = load_artefact(self.path, _KIND)
        wrong = [name for name, value in self.settings.items() if settings.get(name) != value]
        if wrong:
            raise ValueError(
                f"The unfinished profile {self.path} is of another {wrong[0]} ({settings.get(wrong[0])}, now "
                f"{self.settings[wrong[0]]}): delete it to begin anew."
            )
        return _State(**{k: v.to(device) if k in ("x", "before", "done_x0") else v for k, v in tensors.items()})

    def save(self, state: _State, *, now: bool = False) -> None:
        """Writes ``state``, if it is time."""
        start = time.monotonic()
        if not now and start - self.last < 20 * self.spent:
            return
        save_artefact(self.path, _KIND, dict(vars(state)), self.settings, shown={})
        self.last = time.monotonic()
        self.spent = self.last - start

    def delete(self) -> None:
        """Forgets the file."""
        delete_artefact(self.path)
