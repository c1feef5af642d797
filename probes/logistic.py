"""The solver of logistic regressions over states that need not fit into memory.

    minimise over w, b   sum_i up_i log(1 + exp(-z_i)) + down_i log(1 + exp(z_i))  +  l2 / 2 * |w|^2
                         z_i = w . x_i / r + b,  sum_i up_i + down_i = 1,  r = RMS of all entries of x

L-BFGS runs in coordinates that the Hessian at the start of each round makes about equally steep: residual streams
have a few entries hundreds of times larger than the rest, and plain L-BFGS needs hundreds of passes for them. It
starts from the optimum of evenly spaced rows, so that few passes over all rows are left. The optimum is the same.
Memory: a block of states, the evenly spaced rows and a few matrices [width, width].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from probes.rows import HeldStates, StateSource

ROUND = 20
"""L-BFGS steps between two looks at the Hessian."""
SPACED_ROWS = 16384
"""Most evenly spaced rows, or twice the width: the start and the Hessian only need to be about right, and with several
sites the Hessian of more rows would cost more than all passes."""
POLISH = 8
"""Most Newton steps at the end, in double precision."""
START_TOL = 1e-2
"""How far a logit of the start may be from the optimum of the evenly spaced rows."""


@dataclass(frozen=True)
class Solution:
    """The optimum: logit = weight . state + bias, for raw states."""

    weight: torch.Tensor
    """[width], float64."""
    bias: float
    rms: float
    """r: the root of the mean square of all entries of the states."""
    iterations: int
    """L-BFGS steps over all rows."""


def solve(
    states: StateSource,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    l2: float,
    fit_intercept: bool = True,
    max_iter: int = 200,
    tol: float | None = None,
    device: torch.device | None = None,
) -> Solution:
    """Fit to weights `up` [rows] of the outcome 1 and `down` [rows] of the outcome 0; at least one is above 0 a row.

    tol: about how far a logit may be from the optimum's; by default 1e-9 for float64 and 1e-4 for float32 states.
    Raises ValueError if `l2` is not above 0.
    """
    if not l2 > 0:
        raise ValueError(f"l2 must be above 0, got {l2!r}: without a penalty the weights may have no limit")
    device = device or torch.device("cpu")
    tol = tol or (1e-9 if states.dtype == torch.float64 else 1e-4)
    total = float(up.double().sum() + down.double().sum())
    up, down = up.double().to(device) / total, down.double().to(device) / total
    if isinstance(states, HeldStates) and device.type == "cuda" and _fits(states, device):
        states = HeldStates(torch.cat([block.to(device) for _, block in states.blocks()]))

    # The first pass: the scale, and the evenly spaced rows.
    step = -(-len(states) // max(SPACED_ROWS, 2 * states.width))
    square, spaced = 0.0, []
    for rows, block in states.blocks():
        block = block.to(device)
        square += float((up[rows] + down[rows]) @ block.norm(dim=1).double().square())
        spaced.append(block[-rows.start % step :: step].clone())
    rms = math.sqrt(square / states.width) or 1.0
    sample = HeldStates(torch.cat(spaced))
    share = (up + down)[::step]
    share = share / share.sum()
    every = _Fit(states, up, down, sample, share, rms, l2, fit_intercept)
    at = torch.zeros(states.width + 1, dtype=torch.float64, device=device)  # scaled weights, then the bias
    if step > 1:
        scale = 1 / (up + down)[::step].sum()
        few = _Fit(sample, up[::step] * scale, down[::step] * scale, sample, share, rms, l2, fit_intercept)
        near, _ = few.descend(at, max_iter, START_TOL)
        if every.value(near)[0] < math.log(2):  # the loss at zero; rows of one kind alone may lead far off
            at = near
    at, iterations = every.descend(at, max_iter, tol)
    if iterations < max_iter and states.dtype == torch.float64:
        at = every.polish(at, tol)
    at = at.cpu()
    return Solution(at[:-1] / rms, float(at[-1]) * fit_intercept, rms, iterations)


@dataclass
class _Fit:
    """The objective over `states`, its weights scaled to sum to 1, and the way down."""

    states: StateSource
    up: torch.Tensor
    down: torch.Tensor
    sample: HeldStates
    """Evenly spaced rows, from which the Hessian is estimated."""
    share: torch.Tensor
    """Their weights, which sum to 1."""
    rms: float
    l2: float
    fit_intercept: bool
    _last: tuple[torch.Tensor, float, torch.Tensor] | None = None
    """Where `value` was asked for last, and its answer: each round of L-BFGS asks again where the last one ended."""

    @torch.no_grad()
    def value(self, at: torch.Tensor) -> tuple[float, torch.Tensor]:
        """The objective and its gradient at (scaled weights, bias), summed over blocks in float64."""
        if self._last is not None and torch.equal(at, self._last[0]):
            return self._last[1:]
        w, b = at[:-1], at[-1] * self.fit_intercept
        loss, slope, pull = torch.zeros_like(b), torch.zeros_like(w), torch.zeros_like(b)
        for rows, block in self._blocks():
            z = (block @ (w / self.rms).to(block.dtype)).double() + b
            up, down = self.up[rows], self.down[rows]
            loss -= up @ logsigmoid(z) + down @ logsigmoid(-z)
            residual = down * torch.sigmoid(z) - up * torch.sigmoid(-z)
            slope += (residual.to(block.dtype) @ block).double()
            pull += residual.sum()
        gradient = torch.cat([slope / self.rms + self.l2 * w, pull[None] * self.fit_intercept])
        self._last = at.clone(), float(loss + 0.5 * self.l2 * w @ w), gradient
        return self._last[1:]

    def descend(self, at: torch.Tensor, max_iter: int, tol: float) -> tuple[torch.Tensor, int]:
        """L-BFGS from `at`, and how many steps it took."""
        done = 0
        while done < max_iter:
            whiten = self._whitening(at)
            v = torch.zeros_like(at, requires_grad=True)
            steps = min(ROUND, max_iter - done)
            solver = torch.optim.LBFGS(
                [v],
                max_iter=steps,
                tolerance_grad=tol,
                tolerance_change=tol**2,  # in these coordinates a step gains about the gradient squared
                history_size=ROUND,
                line_search_fn="strong_wolfe",
            )

            def look(v: torch.Tensor = v, whiten: torch.Tensor = whiten, at: torch.Tensor = at) -> float:
                loss, gradient = self.value(at + whiten @ v.detach())
                v.grad = whiten.T @ gradient
                return loss

            solver.step(look)
            taken = int(solver.state[v]["n_iter"])
            done += max(taken, 1)
            at = at + whiten @ v.detach()
            if taken < steps:
                break
        return at, done

    def polish(self, at: torch.Tensor, tol: float) -> torch.Tensor:
        """Newton steps from `at`, which must be near the optimum.

        A loss in double precision shows 1e-16, and so L-BFGS a gradient of 1e-8 only. The Hessian is that of the
        evenly spaced rows throughout, so that each step leaves a small share of the gradient.
        """
        whiten, best, least = self._whitening(at, floor=0.0), at, math.inf
        for _ in range(POLISH):
            v = whiten.T @ self.value(at)[1]
            size, before = float(v.abs().max()), least
            if size < least:
                best, least = at, size
            if size < tol / 1e3 or not size < before / 2:
                break
            at = at - whiten @ v
        return best

    @torch.no_grad()
    def _whitening(self, at: torch.Tensor, floor: float = 1e-6) -> torch.Tensor:
        """W [width + 1, width + 1] with W W^T the inverse Hessian at `at`, estimated from the evenly spaced rows.

        A row bends the loss by at least `floor`: far from the optimum, rows that seem decided may not stay so.
        """
        size = len(at)
        hessian = torch.zeros(size, size, dtype=torch.float64, device=at.device)
        for rows, block in self.sample.blocks():
            ones = torch.full_like(block[:, :1], float(self.fit_intercept), dtype=torch.float64)
            some = torch.cat([block.double() / self.rms, ones], dim=1)
            p = torch.sigmoid(some[:, :-1] @ at[:-1] + at[-1] * self.fit_intercept)
            curvature = (p * (1 - p)).clamp_min(floor) * self.share[rows]
            hessian += (some * curvature[:, None]).T @ some
        diagonal = hessian.diagonal()
        diagonal[:-1] += self.l2
        diagonal[-1] += self.l2 * (floor > 0)  # a bias has no penalty, but far from the optimum its slope may vanish
        diagonal += 1e-12 * float(diagonal.max())  # for rounding
        factor = torch.linalg.cholesky(hessian)
        identity = torch.eye(size, dtype=torch.float64, device=at.device)
        return torch.linalg.solve_triangular(factor, identity, upper=False).T.contiguous()

    def _blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for rows, block in self.states.blocks():
            yield rows, block.to(self.up.device)


def _fits(states: StateSource, device: torch.device) -> bool:
    """Whether half of the GPU's free memory holds them; else they go there block by block, pass by pass."""
    return len(states) * states.width * states.dtype.itemsize < torch.cuda.mem_get_info(device)[0] // 2
