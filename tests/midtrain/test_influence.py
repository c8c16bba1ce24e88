"""Influence by lookahead: identities on quadratics, the state it must not touch, its errors, projections."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from posttrain.core.errors import UserError
from posttrain.midtrain import influence
from posttrain.midtrain.influence import directions, measure, preconditioner, threshold


class Quadratics:
    """Units L_i = (theta - c_i)' H_i (theta - c_i) / 2 + constant_i at a random theta, float64; one replicate."""

    def __init__(self, n: int = 4, d: int = 6, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        M = torch.randn(n, d, d, generator=g, dtype=torch.float64)
        self.H, self.c = M @ M.mT / d, torch.randn(n, d, generator=g, dtype=torch.float64)
        self.theta = torch.randn(1, d, generator=g, dtype=torch.float64).requires_grad_()
        self.constant, self.n = torch.zeros(n, dtype=torch.float64), n

    def losses(self, _m: int = 0):
        away = self.theta - self.c
        return (0.5 * torch.einsum("nd,nde,ne->n", away, self.H, away) + self.constant)[None]

    def measure(self, **options):
        options = {"step": 0.05, "micro": 1} | options
        return measure([self.theta], lambda i, m: self.losses(m)[:, i], self.losses, units=self.n, **options)

    @property
    def g(self):
        return torch.einsum("nde,ne->nd", self.H, self.theta.detach() - self.c)

    def after(self, order, eta):
        theta = self.theta.detach()[0]
        for u in order:
            theta = theta - eta * self.H[u] @ (theta - self.c[u])
        return theta


@pytest.mark.parametrize("seed", range(5))
def test_A_and_D_on_quadratics_are_exact(seed):
    q, eta = Quadratics(seed=seed), 0.05
    found, g = q.measure(step=eta), q.g
    first = eta * g @ g.T
    curvature = torch.einsum("id,jde,ie->ij", g, q.H, g)  # g_i' H_j g_i
    assert np.allclose(found.A[0], (first - eta**2 / 2 * curvature).numpy(), rtol=0, atol=1e-12)
    assert np.allclose(found.D[0], (eta**2 / 2 * (curvature.T - curvature)).numpy(), rtol=0, atol=1e-12)
    assert np.array_equal(found.D, -np.swapaxes(found.D, 1, 2))
    assert np.allclose(found.losses, q.losses().detach().numpy())


def test_the_order_effect_of_a_pair_and_its_residual_of_third_order():
    q = Quadratics(seed=3)
    g, (i, j) = q.g, (0, 1)

    def residuals(eta):
        theta_gap = q.after([i, j], eta) - q.after([j, i], eta) - eta**2 * (q.H[j] @ g[i] - q.H[i] @ g[j])

        def both(theta):
            return sum(0.5 * (theta - q.c[k]) @ q.H[k] @ (theta - q.c[k]) for k in (i, j))

        benefit = both(q.after([j, i], eta)) - both(q.after([i, j], eta))
        return theta_gap.norm(), benefit - eta**2 * (g[i] + g[j]) @ (q.H[i] @ g[j] - q.H[j] @ g[i])

    assert float(residuals(1e-3)[0]) < 1e-12, "the difference of the parameters is exact for quadratics"
    big, small = residuals(1e-3)[1], residuals(5e-4)[1]
    assert float(big / small) == pytest.approx(8, rel=0.02)


def test_a_preconditioned_step_is_exact_on_quadratics():
    q, eta = Quadratics(), 0.05
    P = torch.rand(1, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.1
    d = q.g * P
    expected = eta * d @ q.g.T - eta**2 / 2 * torch.einsum("id,jde,ie->ij", d, q.H, d)
    assert np.allclose(q.measure(step=eta, scale=[P]).A[0], expected.numpy(), rtol=0, atol=1e-12)


def test_the_sign_of_D_names_the_better_order_of_most_random_pairs():
    hits = []
    for seed in range(150):
        q, eta = Quadratics(n=2, seed=seed), 1e-3
        D, g = q.measure(step=eta).D[0], q.g
        hits.append(float(D[0, 1]) * float((g[0] + g[1]) @ (q.H[0] @ g[1] - q.H[1] @ g[0])) > 0)
    assert 0.7 < np.mean(hits) < 0.95


def test_pair_exact_is_the_benefit_itself():
    q, eta = Quadratics(), 0.1
    found = q.measure(step=eta, edge="pair_exact")

    def total(order):
        theta = q.after(order, eta)
        return float(np.mean([0.5 * (theta - q.c[k]) @ q.H[k] @ (theta - q.c[k]) for k in range(q.n)]))

    for i in range(q.n):
        for j in range(q.n):
            assert found.D[0, i, j] == pytest.approx(total([j, i]) - total([i, j]) if i != j else 0.0, abs=1e-12)
    with pytest.raises(UserError, match="pair_exact takes at most 8 units per window, there are 9"):
        Quadratics(n=9).measure(edge="pair_exact")


def test_without_curvature_no_direction_and_no_order_effect():
    slopes = torch.randn(4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    theta = torch.randn(1, 6, dtype=torch.float64, requires_grad=True)
    found = measure([theta], lambda i, m: theta @ slopes[i], lambda m: theta @ slopes.T, units=4, micro=1, step=0.3)
    assert np.abs(found.D).max() < 1e-14 and np.abs(found.A).max() > 0.1
    unit = measure(
        [theta], lambda i, m: theta @ slopes[i], lambda m: theta @ slopes.T, units=4, micro=1, step=0.3, edge="unit_step"
    )
    norms = slopes.norm(dim=1)
    cosine = (slopes @ slopes.T) / norms[:, None] / norms
    assert np.allclose(unit.D[0], (0.3 * cosine * (norms[None] - norms[:, None])).numpy(), atol=1e-12), "normalising makes one"


def test_relative_losses_make_a_direction_of_first_order():
    q, eta = Quadratics(), 1e-6
    L, g = q.losses().detach()[0], q.g
    expected = eta * (g @ g.T) * (1 / L[None] - 1 / L[:, None])
    assert np.allclose(q.measure(step=eta, edge="rel_loss").D[0], expected.numpy(), rtol=1e-3, atol=1e-12)


def test_the_hand_case_in_one_dimension():
    """D names an order although both orders end at 0.28: a trap for claims about D."""
    q = Quadratics(n=2, d=1)
    q.H, q.c = torch.tensor([[[1.0]], [[2.0]]], dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    q.theta = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    found = q.measure(step=0.1)
    # g_1 = -1, g_2 = -2: A_12 = 1 - (1 - 0.1)^2 = 0.19; A_21 = (1 - (1 - 0.2)^2) / 2 = 0.18
    assert found.A[0, 0, 1] == pytest.approx(0.19, abs=1e-12) and found.A[0, 1, 0] == pytest.approx(0.18, abs=1e-12)
    assert found.D[0, 0, 1] == pytest.approx(0.01, abs=1e-12)
    assert float(q.after([0, 1], 0.1)) == pytest.approx(0.28) == float(q.after([1, 0], 0.1))


def test_a_constant_added_to_a_loss_changes_nothing():
    q = Quadratics()
    before = q.measure()
    q.constant = q.constant + torch.tensor([0.0, 7.0, 0.0, -2.0], dtype=torch.float64)
    assert np.allclose(q.measure().A, before.A, atol=1e-12)
    assert not np.allclose(q.measure(edge="rel_loss").A, Quadratics().measure(edge="rel_loss").A)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))


def trained(steps: int = 3):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).pow(2).mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("edge", influence.EDGES)
def test_probing_leaves_every_bit_as_it_was(edge):
    model, optimizer = trained()
    model.train()
    model[2].eval()  # a mode that differs inside
    x = torch.randn(3, 16, 4)
    state, adam = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    grads, rng = [p.grad.clone() for p in model.parameters()], torch.random.get_rng_state()
    modes = [m.training for m in model.modules()]
    parameters = list(model.parameters())

    def loss(i, m):
        assert not model.training and not model[1].training, "probing runs in evaluation mode"
        torch.rand(5)  # whatever the model draws
        return model(x[i, m * 8 : m * 8 + 8]).pow(2).mean().reshape(1)

    found = measure(
        parameters,
        loss,
        lambda m: torch.stack([loss(i, m) for i in range(3)], 1),
        units=3,
        micro=2,
        step=1e-3,
        edge=edge,
        scale=preconditioner(optimizer, parameters),
        module=model,
    )
    assert np.isfinite(found.D).all() and np.abs(found.A).max() > 0
    assert all(torch.equal(a, b) for a, b in zip(state.values(), model.state_dict().values(), strict=True))
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(a, p.grad) for a, p in zip(grads, model.parameters(), strict=True))
    assert torch.equal(rng, torch.random.get_rng_state())
    for old, new in zip(adam["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


def test_an_error_while_probing_puts_everything_back():
    model, _ = trained()
    before = copy.deepcopy(model.state_dict())

    def broken(_m):
        if not torch.equal(next(model.parameters()), before["0.weight"]):
            raise RuntimeError("no")
        return torch.ones(1, 2)

    with pytest.raises(RuntimeError):
        measure(
            list(model.parameters()),
            lambda i, m: model(torch.ones(4, 4)).sum().reshape(1),
            broken,
            units=2,
            micro=1,
            step=0.1,
            module=model,
        )
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)) and model.training


def test_the_preconditioner_is_what_adam_divides_by():
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = torch.optim.AdamW([p], lr=0.1, betas=(0.0, 0.9), weight_decay=0.0, eps=1e-3)
    assert preconditioner(optimizer, [p]) is None
    for factor in (1.0, 2.0):
        p.grad = factor * torch.tensor([0.3, 0.01, -2.0])
        before = p.detach().clone()
        optimizer.step()
    (scale,) = preconditioner(optimizer, [p])
    assert torch.allclose(before - p.detach(), 0.1 * p.grad * scale, rtol=1e-5), "without momentum it is Adam's own step"
    from types import SimpleNamespace

    assert torch.equal(preconditioner(SimpleNamespace(optimizer=optimizer), [p])[0], scale)  # as accelerate wraps it
    plain = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    plain.step()
    with pytest.raises(UserError, match=r"SGD keeps no second moment.*precondition: false"):
        preconditioner(plain, [p])


def test_units_whose_loss_or_gradient_is_not_finite_are_dropped():
    q = Quadratics()
    clean = q.measure(micro=2)
    q.constant = q.constant + torch.tensor([0.0, 0.0, float("nan"), 0.0], dtype=torch.float64)
    found = q.measure(micro=2)
    rest = np.ix_([0], [0, 1, 3], [0, 1, 3])
    assert np.allclose(found.D[rest], clean.D[rest]) and np.isnan(found.D[0, 2]).all() and np.isnan(found.D[0, :, 2]).all()
    assert np.isnan(found.se_D[0, 2]).all() and np.isfinite(found.se_D[rest]).all()
    q = Quadratics()
    found = measure(
        [q.theta], lambda i, m: q.losses()[:, i] * (float("inf") if i == 1 else 1), q.losses, units=4, micro=1, step=0.05
    )
    assert np.isnan(found.A[0, 1]).all() and np.isfinite(found.A[np.ix_([0], [0, 2, 3], [0, 2, 3])]).all()
    pairs = Quadratics()
    pairs.constant = pairs.constant + torch.tensor([0.0, float("nan"), 0.0, 0.0], dtype=torch.float64)
    assert np.isfinite(pairs.measure(edge="pair_exact").D[np.ix_([0], [0, 2, 3], [0, 2, 3])]).all()


def test_stacked_replicates_are_measured_as_each_alone():
    qs = [Quadratics(seed=s) for s in range(3)]
    for edge in influence.EDGES:
        theta = torch.cat([q.theta.detach() for q in qs]).requires_grad_()
        H, c = torch.stack([q.H for q in qs]), torch.stack([q.c for q in qs])

        def losses(_m, theta=theta, H=H, c=c):
            away = theta[:, None] - c
            return 0.5 * torch.einsum("rnd,rnde,rne->rn", away, H, away)

        found = measure([theta], lambda i, m, f=losses: f(m)[:, i], losses, units=4, micro=1, step=0.05, edge=edge)
        for r, q in enumerate(qs):
            assert np.allclose(found.A[r], q.measure(edge=edge).A[0], atol=1e-12)


def noisy(seed: int, shared: bool, K: int = 6, M: int = 5, d: int = 20):
    """Units that are all alike: linear losses whose slopes on the train half and the probe half are samples of one slope."""
    rng = torch.Generator().manual_seed(seed)
    mean = torch.randn(d, generator=rng, dtype=torch.float64)
    train, probe = (mean + torch.randn(M, K, d, generator=rng, dtype=torch.float64) for _ in range(2))
    theta = torch.zeros(1, d, dtype=torch.float64, requires_grad=True)
    return measure(
        [theta],
        lambda i, m: theta @ train[m, i],
        lambda m: theta @ probe[m].T,
        units=K,
        micro=M,
        step=0.1,
        shared_gradient=shared,
    )


def test_the_share_of_edges_among_equal_units_is_nominal_only_if_the_gradients_noise_is_counted():
    """The card's error, over probe micro-batches for one gradient per unit, leaves out the train half."""
    from scipy.stats import t

    off = ~np.eye(6, dtype=bool)

    def rate(shared):
        found = [noisy(seed, shared) for seed in range(60)]
        return np.mean([(threshold(f.se_D, 1.0) < f.D)[0][off].mean() for f in found])

    nominal = t.sf(1.0, 4)
    assert rate(False) == pytest.approx(nominal, abs=0.03)
    assert rate(True) > 1.5 * nominal


def test_standard_errors_by_hand():
    A = np.zeros((3, 1, 2, 2))
    A[:, 0, 0, 1], A[:, 0, 1, 0] = [1.0, 2.0, 3.0], [1.0, 1.0, 4.0]
    found = influence.summarise(A, np.ones((3, 1, 2)), np.ones((1, 2), dtype=bool))
    assert found.A[0, 0, 1] == 2 and found.se[0, 0, 1] == pytest.approx(1 / np.sqrt(3))
    assert found.D[0, 0, 1] == 0 and found.se_D[0, 0, 1] == pytest.approx(np.std([0, 1, -1], ddof=1) / np.sqrt(3))
    assert np.array_equal(threshold(found.se_D, 2.0), 2 * found.se_D)
    one = influence.summarise(A[:1], np.ones((1, 1, 2)), np.ones((1, 2), dtype=bool))
    assert np.isnan(one.se_D[0, 0, 1]) and threshold(one.se_D, 1.0)[0, 0, 1] == 0


def test_the_average_of_old_and_new():
    A = np.array([[0.0, 1.0], [0.0, 0.0]])
    old, new = (influence.Influence(s * A, s * (A - A.T), A, A + A.T, np.full(2, s)) for s in (1.0, 3.0))
    found = influence.blend(old, new)
    assert found.A[0, 1] == pytest.approx(0.7 + 0.9) and found.D[1, 0] == pytest.approx(-1.6) and found.losses[0] == 3
    assert found.se[0, 1] == pytest.approx(np.hypot(0.7, 0.3))
    dropped = new._replace(A=np.full((2, 2), np.nan), D=np.full((2, 2), np.nan))
    assert influence.blend(old, dropped).A[0, 1] == 1 and influence.blend(None, new) is new


def test_random_projection_keeps_inner_products():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=5000), rng.normal(size=5000)
    y = y + x
    projected = influence.project(np.stack([x, y]), 4096, 0, chunk=1000)
    assert projected.shape == (2, 4096)
    assert projected[0] @ projected[1] == pytest.approx(x @ y, rel=0.05)
    assert projected[0] @ projected[0] == pytest.approx(x @ x, rel=0.05)
    small = [influence.project(np.stack([x, y]), 16, seed) for seed in range(400)]
    means = np.array([p[0] @ p[1] for p in small])
    assert means.mean() == pytest.approx(x @ y, abs=4 * means.std() / 20), "right in expectation at any r"


def test_representatives_and_what_their_clusters_inherit():
    rng = np.random.default_rng(0)
    features = np.repeat(np.eye(3) * 10, 4, axis=0) + 0.1 * rng.normal(size=(12, 3))
    labels, chosen = influence.representatives(features, 3, 0)
    assert len(set(labels[:4])) == len(set(labels[4:8])) == len(set(labels[8:])) == 1 and len(set(labels)) == 3
    assert [labels[u] for u in chosen] == [0, 1, 2]
    D = np.array([[0, 1.0, 2.0], [-1.0, 0, 3.0], [-2.0, -3.0, 0]])
    whole = influence.expand(D, labels)
    assert whole.shape == (12, 12) and (whole == -whole.T).all() and (whole[:4, :4] == 0).all()
    assert whole[0, 5] == D[labels[0], labels[5]]
    assert len(set(influence.representatives(features[:2], 5, 0)[0])) <= 2
    D[1], D[:, 1] = np.nan, np.nan
    assert np.isnan(influence.expand(D, np.array([1, 0, 1, 2]))[[0, 2]]).all(), "a dropped cluster is dropped as a whole"


def test_directions_of_unit_norm_and_unused_parameters():
    theta, unused = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.ones(1, 2, requires_grad=True)
    (d, zero), finite = directions((theta**2).sum(1) / 2, [theta, unused], None, True)
    assert torch.allclose(d, torch.tensor([[0.6, 0.8]])) and finite.all() and not zero.any()
