"""Projections: equal to the dense ones, exact at the ends, and what optimisers make of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posttrain.core.errors import UserError
from posttrain.edit.kfac import Factors
from posttrain.edit.projector import ProjectedOptimizer, corners, orthonormal, projectors, spectrum, staircase, threshold

DO, DI = 4, 5
GAMMAS = (0.1, 0.5, 0.9, 0.99)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def psd(n: int, seed: int, rank: int | None = None) -> torch.Tensor:
    x = random(rank or n, n, seed=seed)
    return x.T @ x / n


def factors(seed: int = 0, do: int = DO, di: int = DI, rank: int | None = None) -> Factors:
    return Factors({"l": psd(di, 100 + seed, rank)}, {"l": psd(do, 200 + seed)}, 10)


def projector(found: Factors, gamma: float, **more):
    return projectors(found, gamma, dtype=torch.float64, **more)[0]["l"]


def dense(found: Factors, gamma: float) -> torch.Tensor:
    """Projection matrix [do*di, do*di] for row-major vec(W), from the eigenvectors of kron(S, A) itself."""
    values, vectors = torch.linalg.eigh(torch.kron(found.s["l"], found.a["l"]))
    descending, total = values.flip(0).cumsum(0), values.sum()
    k = next(r for r in range(len(values)) if descending[r] / total >= gamma - 1e-15) + 1
    free = vectors[:, : len(values) - k]
    return free @ free.T


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize(("seed", "do", "di"), [*((s, DO, DI) for s in range(5)), (5, 9, 11), (6, 12, 7)])
def test_matrix_free_is_dense(gamma, seed, do, di):
    found, q = factors(seed, do, di), random(do, di, seed=seed)
    expected = dense(found, gamma) @ q.flatten()
    assert (projector(found, gamma)(q).flatten() - expected).abs().max() < 1e-10


@pytest.mark.parametrize("more", [{}, {"subspace": "a_only"}, {"subspace": "random", "seed": 3}])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_projection_is_idempotent_symmetric_and_short(gamma, more):
    project = projector(factors(do=7, di=9), gamma, **more)
    q, r = random(7, 9, seed=1), random(7, 9, seed=2)
    once = project(q)
    assert torch.allclose(project(once), once, atol=1e-12)
    assert (once * r).sum() == pytest.approx((q * project(r)).sum().item(), abs=1e-12)
    assert once.norm() <= q.norm() and not torch.allclose(once, q, atol=1e-3)


def test_activation_subspace_is_its_formula():
    found, q = factors(), random(DO, DI, seed=1)
    values, u = spectrum(found.a["l"])
    for gamma in (0.2, 0.7, 0.9):
        free = (values < threshold(values, gamma)).double()
        assert torch.allclose(projector(found, gamma, subspace="a_only")(q), q @ u @ torch.diag(free) @ u.T, atol=1e-12)


def test_both_ends_are_exact():
    q = random(DO, DI, seed=1).float()
    nothing = Factors({"l": torch.zeros(DI, DI)}, {"l": psd(DO, 1)}, 1)  # no curvature: nothing to protect
    assert projectors(nothing, 0.5)[0]["l"](q) is q
    everything = projectors(factors(), 1.0)[0]["l"]
    assert torch.equal(everything(q), torch.zeros(DO, DI))
    assert projectors(nothing, 0.5)[1]["l"] == 1 and projectors(factors(), 1.0)[1]["l"] == 0


def test_hand_case_of_the_threshold():
    values = torch.outer(torch.tensor([3.0, 1.0]), torch.tensor([4.0, 1.0])).double()
    for gamma, star in ((0.0, 12), (0.5, 12), (0.6, 12), (0.61, 4), (0.8, 4), (0.81, 3), (0.95, 3), (0.96, 1), (1.0, 1)):
        assert threshold(values, gamma) == star, gamma


def test_gamma_one_blocks_what_the_sum_no_longer_feels():
    values = torch.tensor([1e20, 1.0, 0.0], dtype=torch.float64)
    assert threshold(values, 1.0) == 1.0 and threshold(values, 0.999) == 1e20


def test_ties_are_blocked_together():
    values = torch.tensor([2.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    assert threshold(values, 0.5) == 1.0 and (values < 1.0).sum() == 0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 1))
def test_protected_energy_reaches_gamma_and_no_more_than_it_must(numbers, gamma):
    values = torch.tensor(numbers, dtype=torch.float64)
    star, total = threshold(values, gamma), math.fsum(numbers)
    if total == 0:
        assert star == math.inf
        return
    blocked = sorted((v for v in numbers if v >= star), reverse=True)
    assert math.fsum(blocked) >= gamma * total * (1 - 1e-12)
    without = [v for v in blocked if v > star]  # the smallest one, and what ties with it
    assert not without or math.fsum(without) < gamma * total * (1 + 1e-12)


def test_float64_decides_close_to_one():
    """A million eigenvalues and gamma = 1 - 1e-7: sums in float32 would stop growing long before the end."""
    ramp, gamma = torch.linspace(1, 1e-3, 1_000_000, dtype=torch.float64), 1 - 1e-7
    free = ramp[ramp < threshold(ramp, gamma)].sum() / ramp.sum()
    assert 0.98e-7 < free <= 1e-7
    rounded = ramp.float().cumsum(0)
    assert int((rounded / rounded[-1] < gamma).sum()) != int((ramp >= threshold(ramp, gamma)).sum()) - 1


def test_negative_and_tiny_eigenvalues_are_zero():
    values, vectors = spectrum(psd(6, 1, rank=3))
    assert (values[3:] == 0).all() and (values[:3] > 0).all() and values.tolist() == sorted(values.tolist(), reverse=True)
    assert torch.allclose(vectors @ torch.diag(values) @ vectors.T, psd(6, 1, rank=3), atol=1e-12)


@pytest.mark.parametrize("gamma", [-0.1, 1.1, float("nan")])
def test_gamma_outside_its_range_is_one_sentence(gamma):
    with pytest.raises(UserError, match=r"gamma = .*: give a share between 0 and 1\.$"):
        projectors(factors(), gamma)


def test_factors_that_are_not_finite_are_one_sentence():
    broken = factors()
    broken.s["l"] = torch.full((DO, DO), math.inf)
    with pytest.raises(UserError, match=r"is not finite; look for broken weights"):
        projectors(broken, 0.5)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_without_curvature_in_the_outputs_it_is_the_projection_by_activations(gamma):
    """Proposition 1: editors that look at activations alone take S for the identity."""
    one = factors()
    flat = Factors(one.a, {"l": torch.eye(DO, dtype=torch.float64)}, 1)
    q = random(DO, DI, seed=1)
    assert torch.allclose(projector(flat, gamma)(q), projector(one, gamma, subspace="a_only")(q), atol=1e-10)


def test_scaling_a_factor_changes_nothing():
    q, one = random(DO, DI, seed=1), factors()
    other = Factors({"l": one.a["l"] * 1e5}, {"l": one.s["l"] * 1e-7}, 1)
    for gamma in GAMMAS:
        assert torch.allclose(projector(one, gamma)(q), projector(other, gamma)(q), atol=1e-10)


def test_rotating_the_inputs_commutes():
    q, one = random(DO, DI, seed=1), factors()
    rotation = orthonormal(DI, DI, 5, q)
    other = Factors({"l": rotation @ one.a["l"] @ rotation.T}, one.s, 1)
    for gamma in GAMMAS:
        assert torch.allclose(projector(other, gamma)(q @ rotation.T), projector(one, gamma)(q) @ rotation.T, atol=1e-10)


def test_random_subspace_has_the_same_size_and_another_direction():
    found, q = factors(do=8, di=8), random(8, 8, seed=1)
    sizes = {s: projectors(found, 0.7, subspace=s)[1]["l"] for s in ("kfac", "random")}
    assert sizes["kfac"] == sizes["random"]
    basis = torch.eye(64, dtype=torch.float64).view(64, 8, 8)
    rank = {s: sum((projector(found, 0.7, subspace=s)(e) * e).sum().item() for e in basis) for s in sizes}  # trace
    assert rank["kfac"] == pytest.approx(rank["random"]) == pytest.approx(64 * sizes["kfac"])
    one, two = (projector(found, 0.7, subspace="random", seed=s) for s in (0, 1))
    assert not torch.allclose(one(q), two(q)) and not torch.allclose(one(q), projector(found, 0.7)(q))
    assert torch.equal(one(q), projector(found, 0.7, subspace="random", seed=0)(q))


def test_global_energy_compares_layers():
    """A layer of small curvature is blocked less than on its own, one of large curvature more."""
    small, large = factors(0), factors(1)
    both = Factors({"s": small.a["l"] * 1e-3, "l": large.a["l"]}, {"s": small.s["l"], "l": large.s["l"]}, 1)
    own, shared = projectors(both, 0.9)[1], projectors(both, 0.9, energy="global")[1]
    assert shared["s"] == 1.0 and shared["l"] <= own["l"] and own["s"] < 1


def test_null_space_of_the_activations_is_free_at_gamma_one():
    """Proposition 1: what no activation sees has no curvature, whatever S is."""
    rank = 3
    activations = random(20, rank, seed=1) @ random(rank, DI, seed=2)
    found = Factors({"l": activations.T @ activations / 20}, {"l": psd(DO, 1)}, 20)
    values, vectors = spectrum(found.a["l"])
    null = vectors[:, values == 0]
    inside = random(DO, DI, seed=3) @ null @ null.T
    assert (inside @ activations.T).abs().max() < 1e-10
    project = projector(found, 1.0)
    assert torch.allclose(project(inside), inside, atol=1e-10)
    basis = torch.eye(DO * DI, dtype=torch.float64).view(-1, DO, DI)
    trace = sum((project(e) * e).sum().item() for e in basis)
    assert trace == pytest.approx(DO * (DI - rank))


def test_corners_are_a_partition():
    for gamma in (0.01, 0.3, 0.9, 0.999):
        a, s = spectrum(psd(9, 1))[0], spectrum(psd(6, 2))[0]
        products = torch.outer(s, a)
        blocked = products >= threshold(products, gamma)
        rows, columns, subtract = corners(blocked)
        outside = (blocked if subtract else ~blocked).clone()
        outside[rows, columns] = False
        assert not outside.any()


def test_the_staircase_is_covered_once_and_cheaply():
    values = torch.outer(torch.arange(1, 41).double() ** -1.5, torch.arange(1, 61).double() ** -1.5)
    for from_first in (True, False):
        pairs = values > 2e-3 if from_first else (values > 2e-3).flip(0, 1)
        pairs = pairs[pairs.any(1)][:, pairs.any(0)]
        covered = torch.zeros_like(pairs, dtype=torch.long)
        for rows, columns in staircase(pairs, from_first):
            covered[rows, columns] += 1
        assert covered.max() == 1 and (covered[pairs] == 1).all() and covered.sum() < 0.6 * pairs.numel()


# --- optimisers -------------------------------------------------------------------------------------------------


def run(mode: str, make, gamma: float, steps: int = 60, dtype=torch.float32, found=None):
    """(W0, W, projector) after steps on a quadratic loss with noise."""
    found = found or factors(do=8, di=12)
    project = projectors(found, gamma, dtype=dtype)[0]["l"]
    weight = torch.nn.Parameter(random(8, 12, seed=1).to(dtype))
    start, target = weight.detach().clone(), random(8, 12, seed=2).to(dtype)
    optimizer = ProjectedOptimizer({"l": weight}, make, {"l": project}, mode)
    for step in range(steps):
        noise = random(8, 12, seed=50 + step).to(dtype)
        ((weight - target) ** 2 + 0.3 * noise * weight).sum().backward()
        optimizer.step()
    return start, weight.detach(), project


def adam(tensors):
    return torch.optim.Adam(tensors, lr=0.01)


@pytest.mark.parametrize("gamma", (0.5, 0.9, 0.999))
def test_step_mode_stays_in_the_subspace(gamma):
    start, end, project = run("step", adam, gamma)
    moved = end - start
    assert moved.norm() > 0.1 and (moved - project(moved)).abs().max() < 1e-6


def test_grad_mode_leaks_more_the_more_is_protected():
    leaks = []
    for gamma in (0.5, 0.9, 0.999):
        start, end, project = run("grad", adam, gamma)
        moved = end - start
        leaks.append(((moved - project(moved)).norm() / moved.norm()).item())
    assert leaks[0] > 0.05 and leaks == sorted(leaks)


def test_without_momentum_and_scaling_both_modes_are_one():
    def sgd(tensors):
        return torch.optim.SGD(tensors, lr=0.01)

    one, two = (run(mode, sgd, 0.9, dtype=torch.float64)[1] for mode in ("grad", "step"))
    assert torch.allclose(one, two, atol=1e-12) and not torch.allclose(one, run("none", sgd, 0.9, dtype=torch.float64)[1])


@pytest.mark.parametrize("mode", ("grad", "step"))
def test_everything_blocked_never_moves(mode):
    start, end, _ = run(mode, adam, 1.0, steps=5)
    assert torch.equal(start, end)


@pytest.mark.parametrize("mode", ("grad", "step"))
def test_nothing_blocked_is_the_optimizer_alone(mode):
    flat = Factors({"l": torch.zeros(12, 12)}, {"l": psd(8, 1)}, 1)
    one, two = (run(m, adam, 0.5, found=flat)[1] for m in (mode, "none"))
    assert torch.allclose(one, two, atol=1e-6) and (mode == "step" or torch.equal(one, two))


def test_bfloat16_weights_keep_small_steps():
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = ProjectedOptimizer({"l": weight}, lambda t: torch.optim.SGD(t, lr=1.0), {}, "none")
    for _ in range(100):
        weight.grad = torch.full((2, 2), -1e-3, dtype=torch.bfloat16)  # alone it is below half a unit of 1.0
        optimizer.step()
    assert weight.dtype == torch.bfloat16 and (weight - 1.1).abs().max() < 0.01


def test_refresh_projects_the_first_moment_alone():
    weight = torch.nn.Parameter(random(DO, DI, seed=1).float())
    before, after = (projectors(factors(s), 0.9)[0]["l"] for s in (0, 1))
    optimizer = ProjectedOptimizer({"l": weight}, adam, {"l": before}, "grad")
    weight.grad = random(DO, DI, seed=2).float()
    optimizer.step()
    state = next(iter(optimizer.optimizer.state.values()))
    first, second = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    assert optimizer.moved() > 0
    optimizer.refresh({"l": after})
    assert torch.equal(state["exp_avg"], after(first)) and not torch.equal(state["exp_avg"], first)
    assert torch.equal(state["exp_avg_sq"], second) and optimizer.moved() == 0
