"""Numbers that must come out exactly, and numbers that are none."""

import math
import os
import socket
import warnings
from ast import literal_eval

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from recast_lightning.errors import UserError
from recast_lightning.objective.advantages import group_advantages, level_advantages, optimality_probability
from recast_lightning.rollout.finite import FiniteCheck, total_norm
from recast_lightning.rollout.metrics import within_group_spread

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CONSTANTS = (0.1, 1 / 3, 1e8, -1e8 / 3, 1e-30, -0.7, 1e-40, 5e-324, 0.0, -0.0)


@pytest.mark.parametrize("aggregation", ["sum", "per_reward"])
@pytest.mark.parametrize("std", ["level", "group"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_rewards_have_exactly_no_advantage_whatever_the_numbers(aggregation, std, dtype):
    """Beside a group that differs, with and without failed scores, for any number of rewards and levels."""
    for constant in CONSTANTS:
        for size in (*range(2, 14), 23, 24, 64):
            rewards, levels = 1 + size % 5, 1 + size % 26
            weights = torch.rand(rewards, levels, dtype=torch.float64)
            weights /= weights.sum(0)
            scores = torch.rand(size + 3, rewards).to(dtype)
            scores[:size] = (torch.tensor([constant], dtype=torch.float64) * torch.arange(1, rewards + 1)).to(dtype)
            order = torch.randperm(size + 3)
            groups = torch.tensor([7] * size + [-1] * 3)[order]
            for failed in (False, True):
                if failed:
                    scores[0, 0], scores[size, -1] = torch.nan, torch.inf
                finite = scores.isfinite().all(1)[order]
                alike = (groups == 7) & finite
                advantages = level_advantages(scores[order], weights, groups, aggregation=aggregation, std=std)
                assert (advantages[alike] == 0).all(), (constant, size, failed)
                assert (optimality_probability(advantages[alike], 5.0) == 0.5).all()
                assert (advantages[(groups == -1) & finite] != 0).any()
                assert (group_advantages(scores[order], groups, std=std)[alike] == 0).all()


def weight(gradient):
    parameter = nn.Parameter(torch.zeros(len(gradient)))
    parameter.grad = torch.tensor(gradient)
    return parameter


def noted(action="stop", **bad):
    """A check with notes of three micro-batches; `bad` makes one number of the second's a NaN."""
    check = FiniteCheck(action)
    for number in range(3):
        tensors = {"latents": torch.zeros(2, 3, 4), "loss": torch.zeros(2)}
        for name, row in bad.items() if number == 1 else ():
            tensors[name][row] = torch.nan
        check.note([f"micro-batch {number}, prompt {text!r}" for text in ("a dog", "a cat")], tensors)
    return check


def test_all_is_well_costs_one_wait_for_the_device():
    class Waits(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.count += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    weights = [(str(i), weight([1.0, 2.0])) for i in range(50)]
    with Waits() as waits:
        assert not noted().refuses_step(total_norm(w for _, w in weights), weights)
    assert waits.count == 1


def test_the_first_bad_number_of_a_step_is_named_and_forgotten():
    weights = [("a", weight([torch.nan])), ("b", weight([1.0])), ("c", weight([torch.inf]))]
    norm = total_norm(w for _, w in weights)
    with pytest.raises(
        UserError, match="micro-batch 1, prompt 'a cat': NaN or inf in the latents: this optimizer step is not"
    ):
        noted(latents=1, loss=0).refuses_step(norm, weights)
    with pytest.raises(UserError, match="^NaN or inf in the gradient of a and of 1 other weights: this optimizer step"):
        noted().refuses_step(norm, weights)
    huge = [("a", weight([3e38, 3e38]))]
    with pytest.raises(UserError, match="^The norm of the gradient is not finite"):
        FiniteCheck("stop").refuses_step(total_norm(w for _, w in huge), huge)
    check = noted("skip", loss=0)
    with pytest.warns(UserWarning, match="prompt 'a dog': NaN or inf in the loss: this optimizer step is skipped"):
        assert check.refuses_step(torch.tensor(1.0), [])
    assert not check.refuses_step(torch.tensor(1.0), [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check.refuses_step(torch.tensor(torch.inf), [])  # said once


def test_gradients_that_overflow_under_a_loss_scaler_are_its_business():
    weights = [("a", weight([torch.inf]))]
    assert noted().refuses_step(total_norm(w for _, w in weights), weights, scaled=True)
    with pytest.raises(UserError, match="in the loss"):
        noted(loss=0).refuses_step(total_norm(w for _, w in weights), weights, scaled=True)


def test_images_that_are_not_finite_are_found_and_named():
    latents, pictures = torch.zeros(4, 2, 2), torch.zeros(4, 3)
    latents[1, 0, 0], pictures[3, 0] = torch.inf, torch.nan
    texts = ["one", "two", "three", "four"]
    with pytest.warns(
        UserWarning, match="Rollout 7, prompt 'two': NaN or inf in the latents of a sample: the image is left"
    ):
        rows, count = FiniteCheck("skip").broken_images(7, latents, pictures, texts)
    assert rows.tolist() == [False, True, False, True]
    assert count == 2
    with pytest.raises(UserError, match="Rollout 7, prompt 'four': NaN or inf in the decoded image"):
        FiniteCheck("stop").broken_images(7, torch.zeros(4, 2, 2), pictures, texts)
    rows, count = FiniteCheck("stop").broken_images(7, torch.zeros(4, 2, 2), torch.zeros(4, 3), texts)
    assert not rows.any()
    assert count == 0


def test_the_spread_is_within_groups_and_without_broken_images():
    pictures = torch.tensor([[0.0, 1.0], [5.0, 5.0], [1.0, 1.0], [5.0, 5.0], [torch.nan, 0.0]])
    half = 0.5**0.5 / 2  # group 0 differs in one pixel of two
    assert within_group_spread(pictures, [0, 1, 0, 1, 1]) == pytest.approx(half / 2)
    assert math.isnan(within_group_spread(pictures[:1], [0]))


def test_an_action_that_is_none_is_refused():
    with pytest.raises(ValueError, match="on_nonfinite must be 'stop' or 'skip', got 'ignore'"):
        FiniteCheck("ignore")


def _sharded(rank, port, folder):
    """Two processes share a layer; the second alone sees a bad number, then a bad shard of the gradient."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = nn.Linear(4, 6)
    whole = nn.Linear(4, 6)
    whole.load_state_dict(layer.state_dict())
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    check = FiniteCheck("skip")
    refused, norms = [], []
    for turn in range(4):
        optimizer.zero_grad()
        layer(torch.ones(2, 4)).square().sum().backward()
        loss = torch.tensor([torch.nan if turn == rank == 1 else 0.0])
        if turn == 2 and rank == 1:
            layer.weight.grad.to_local()[0, 0] = torch.inf
        check.note(["here"], {"loss": loss})
        norms.append(total_norm(layer.parameters()).item())
        refused.append(check.refuses_step(torch.tensor(norms[-1]), layer.named_parameters()))
        if refused[-1]:
            optimizer.zero_grad()
        before = layer.weight.full_tensor()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        assert torch.equal(layer.weight.full_tensor(), before) == refused[-1]
    whole(torch.ones(2, 4)).square().sum().backward()
    (folder / f"{rank}.txt").write_text(
        repr((refused, norms[0], total_norm(whole.parameters()).item(), math.isinf(norms[2])))
    )
    dist.destroy_process_group()


def test_sharded_processes_refuse_a_step_together(tmp_path):
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(_sharded, (port, tmp_path), nprocs=2)
    for rank in range(2):
        refused, norm, single, infinite = literal_eval((tmp_path / f"{rank}.txt").read_text())
        assert refused == [False, True, True, False]
        assert norm == pytest.approx(single)
        assert infinite
