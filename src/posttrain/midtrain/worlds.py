"""Two worlds for the order of training data: a planted chain of prerequisites, and units that are all alike.

Skill k asks for y_k = T_k[y_{k-1}, a_k] given a_0 ... a_k, with y_0 = a_0 and one Latin square T_k per skill. A row of a square
is a permutation, so a_k alone, or any strict subset of the operands, says nothing about y_k: who has not worked out y_{k-1}
stays at a loss of log m. That is the planted prerequisite (paper card d3, "Small-scale replication" 2). It need not have been
trained as a skill of its own: training is end to end, and skills 2 and 3 can be learnt alone, 4 and 5 cannot (a test says in
how many steps).

`Net` is as small as the purpose allows: one block per hop, h_k = norm(W2_k relu(W1_k [h_{k-1}; e_k(a_k)] + b_k)), and one
read-out for all hops. Its replicates are stacked along a first axis, so that many train at the cost of little more than one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from posttrain.core.determinism import derive

if TYPE_CHECKING:
    import torch

    from posttrain.midtrain.influence import Influence
    from posttrain.midtrain.schedules import Decision


def latin(rng: np.random.Generator, symbols: int) -> np.ndarray:
    """A random isotope of addition modulo `symbols`: int64 [m, m], every row and column a permutation."""
    p, q, s = (rng.permutation(symbols) for _ in range(3))
    return s[(p[:, None] + q[None]) % symbols]


class Rows(NamedTuple):
    """Operands int64 [..., K + 1] and the answers of all K skills, int64 [..., K]."""

    operands: np.ndarray
    answers: np.ndarray


def draw(rng: np.random.Generator, squares: np.ndarray, shape: tuple[int, ...]) -> Rows:
    """Uniform operands for squares [K, m, m]; `shape` is that of the leading axes."""
    K, m, _ = squares.shape
    operands = rng.integers(m, size=(*shape, K + 1))
    answers, y = [], operands[..., 0]
    for k in range(K):
        y = squares[k][y, operands[..., k + 1]]
        answers.append(y)
    return Rows(operands, np.stack(answers, -1))


def squares(seed: int, replicate: int, skills: int, symbols: int) -> np.ndarray:
    """The K Latin squares of a replicate, int64 [K, m, m]; the same whatever the schedule."""
    rng = np.random.default_rng(derive(seed, "squares", replicate))
    return np.stack([latin(rng, symbols) for _ in range(skills)])


def stacked(seed: int, name: str, tables: list[np.ndarray], shape: tuple[int, ...]) -> Rows:
    """:func:`draw` for every replicate, along a first axis."""
    found = [draw(np.random.default_rng(derive(seed, name, r)), table, shape) for r, table in enumerate(tables)]
    return Rows(np.stack([f.operands for f in found]), np.stack([f.answers for f in found]))


class Net:
    """R stacked nets. parameters: float32 [R, ...], leaves. Replicate r is the same whatever R is."""

    def __init__(self, seed: int, replicates: int, skills: int, symbols: int, width: int, hidden: int) -> None:
        import torch

        self.skills = skills
        shapes = {
            "embedding": ((skills + 1, symbols, width), 1.0),
            "W1": ((skills, 2 * width, hidden), width**-0.5),
            "b1": ((skills, 1, hidden), 0.0),
            "W2": ((skills, hidden, width), hidden**-0.5),
            "readout": ((width, symbols), width**-0.5),
        }
        drawn = {name: [] for name in shapes}
        for r in range(replicates):
            generator = torch.Generator().manual_seed(derive(seed, "net", r))
            for name, (shape, scale) in shapes.items():
                drawn[name].append(torch.randn(shape, generator=generator) * scale)
        self.weights = {name: torch.stack(values).requires_grad_() for name, values in drawn.items()}
        self.parameters = list(self.weights.values())

    def states(self, operands: torch.Tensor, hops: int) -> torch.Tensor:
        """Operands int64 [R, B, K + 1] -> states after 1 ... hops, float32 [R, hops, B, width]."""
        import torch

        w, width = self.weights, self.weights["embedding"].shape[-1]

        def embed(k: int) -> torch.Tensor:
            return w["embedding"][:, k].gather(1, operands[:, :, k, None].expand(-1, -1, width))

        x, found = embed(0), []
        for k in range(hops):
            z = torch.relu(torch.cat([x, embed(k + 1)], 2) @ w["W1"][:, k] + w["b1"][:, k])
            x = z @ w["W2"][:, k]
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            found.append(x)
        return torch.stack(found, 1)

    def losses(self, operands: torch.Tensor, answers: torch.Tensor, skill: torch.Tensor) -> torch.Tensor:
        """Cross-entropy in nats per row, float32 [R, B]; skill: which one each row asks for, int64 [R, B], 0 is the first."""
        import torch

        x = self.states(operands, int(skill.max()) + 1)
        R, _, B, _ = x.shape
        picked = x[torch.arange(R)[:, None], skill, torch.arange(B)[None]]
        logits = picked @ self.weights["readout"]
        target = answers.gather(2, skill[..., None])[..., 0]
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none")

    def score(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """(mean loss in nats, accuracy) of every skill on rows [R, B, ...]: float64 [R, K] each."""
        import torch

        with torch.no_grad():
            answers = torch.from_numpy(rows.answers).transpose(1, 2)  # [R, K, B]
            logits = self.states(torch.from_numpy(rows.operands), self.skills) @ self.weights["readout"][:, None]
            loss = torch.nn.functional.cross_entropy(logits.permute(0, 3, 1, 2), answers, reduction="none").double().mean(2)
            right = (logits.argmax(-1) == answers).double().mean(2)
        return loss.numpy(), right.numpy()


class Vocabulary:
    """What `models.scratch` asks of a tokenizer, for rows as tokens: an alphabet per operand position, the answers, padding."""

    def __init__(self, skills: int, symbols: int) -> None:
        self.symbols, self.answers = symbols, (skills + 1) * symbols
        self.eos_token_id = self.answers + symbols
        self.pad_token_id = self.eos_token_id

    def __len__(self) -> int:
        return self.eos_token_id + 1


def sequences(rows: Rows, skill: np.ndarray, vocabulary: Vocabulary) -> list[dict]:
    """Token rows a_0 ... a_k y_k for a decoder, padded to K + 2; only y_k is a label. rows: [B, ...], skill: int [B].

    Each: input_ids, attention_mask and labels (-100 elsewhere), int64 [K + 2].
    """
    import torch

    B, K = rows.answers.shape
    place = np.arange(K + 2)[None]
    asked = skill[:, None] + 2  # where the answer stands
    ids = np.concatenate([rows.operands + np.arange(K + 1) * vocabulary.symbols, np.zeros((B, 1), dtype=np.int64)], 1)
    answer = vocabulary.answers + rows.answers[np.arange(B), skill][:, None]
    ids = np.where(place < asked, ids, np.where(place == asked, answer, vocabulary.pad_token_id))
    labels = np.where(place == asked, answer, -100)
    mask = (place <= asked).astype(np.int64)
    names = ("input_ids", "attention_mask", "labels")
    return [dict(zip(names, map(torch.from_numpy, values), strict=True)) for values in zip(ids, mask, labels, strict=True)]


class Trace(NamedTuple):
    """What one run of all replicates leaves."""

    curves: list[dict[str, Any]]
    decisions: list[list[Decision]]  # per replicate
    measured: list[tuple[int, int, str, Influence]]  # (replicate, window, edge, matrices), as measured, before averaging
    probe_seconds: float
    train_seconds: float
    flops_share: float  # of looking, relative to training


def curve_row(replicate: int, step: int, loss: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """One point of curves.parquet: losses in nats and accuracies per skill (1, 2, ...)."""
    row: dict[str, Any] = {"replicate": int(replicate), "step": step, "loss": float(loss.mean())}
    row |= {f"loss_{k + 1}": float(x) for k, x in enumerate(loss)}
    return row | {f"accuracy_{k + 1}": float(x) for k, x in enumerate(right)}
