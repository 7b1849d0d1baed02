"""Random loading programs give the same bytes traced, eager and plain.

A program is a list of numbers that an interpreter turns into view ops, copies, in-place ops, expressions
and reads over the checkpoint's tensors and the model's parameters, always valid, so that hypothesis can
shrink it. All values are small integers in float32, so that every order of evaluation is exact.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trace.loading import Loader, load_all_ways

SHAPES = {"t0": (8, 6), "t1": (6, 8), "t2": (12,), "t3": (2, 4, 6), "t4": (), "t5": (16, 3)}
STATE = {
    name: (torch.arange(float(torch.Size(shape).numel())) + 50 * n).reshape(shape).remainder(97)
    for n, (name, shape) in enumerate(SHAPES.items())
}
PARAMETERS = {"flat": (160,), "grid": (12, 16), "buffer": (48,)}

Step = tuple[int, int, int, int]


class Interpreter:
    """Runs steps; the pool holds the checkpoint's tensors and what was derived from them."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.pool: list[torch.Tensor] = []
        self.log: list[object] = []

    def pick(self, number: int) -> torch.Tensor:
        return self.pool[number % len(self.pool)]

    def window(self, a: int, b: int, shape: torch.Size) -> torch.Tensor | None:
        """A window of `shape` in some parameter: contiguous, strided, or transposed."""
        count = shape.numel()
        if a % 3 == 2 and 1 <= len(shape) <= 2:
            grid = self.model.grid.data if b % 2 else self.model.grid.data.t()
            rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (shape[0], 1)
            if rows > grid.shape[0] or columns > grid.shape[1]:
                return None
            top, left = b % (grid.shape[0] - rows + 1), a % (grid.shape[1] - columns + 1)
            part: torch.Tensor = grid[top : top + rows, left : left + columns]
            return part if len(shape) == 2 else part[:, 0]
        target = self.model.flat.data if a % 3 else self.model.buffer.data
        if count > target.numel():
            return None
        start = b % (target.numel() - count + 1)
        return target[start : start + count].view(shape)  # type: ignore[no-any-return]

    def step(self, kind: int, a: int, b: int, c: int) -> None:
        operations = [self.view, self.copy, self.expression, self.write, self.read, self.touch_parameter]
        # Copies are what it is all about.
        [*operations, self.copy, self.copy, self.view][kind % 9](a, b, c)

    def view(self, a: int, b: int, c: int) -> None:
        x = self.pick(a)
        if x.dim() == 0:
            self.pool.append(x.expand(2 + b % 3) if c % 2 else x.unsqueeze(0))
            return
        dim = b % x.dim()
        size = x.shape[dim]
        choices: list[Any] = [
            lambda: x.narrow(dim, c % size, 1 + (a + b) % (size - c % size)),
            lambda: x.select(dim, c % size),
            lambda: x.transpose(0, x.dim() - 1),
            lambda: x.unsqueeze(dim),
            lambda: x.flatten(),
            lambda: x.chunk(2, dim)[-1],
            lambda: x.unbind(dim)[c % size],
            lambda: x.reshape(-1, size) if x.numel() else x,
            lambda: x[..., :: 1 + c % 2],
            lambda: x.view(torch.int32).view(torch.float32),
            lambda: x.detach(),
            lambda: x.squeeze(),
            lambda: torch.split(x, 1 + c % size, dim)[0],
            lambda: x.expand(2, *x.shape),
        ]
        self.pool.append(choices[(a + b + c) % len(choices)]())

    def copy(self, a: int, b: int, c: int) -> None:
        x = self.pick(a)
        target = self.window(b, c, x.shape)
        if target is not None:
            target.copy_(x)

    def expression(self, a: int, b: int, c: int) -> None:
        x, y = self.pick(a), self.pick(b)
        choices: list[Any] = [
            lambda: x.clone(),
            lambda: x.contiguous(),
            lambda: x + 1,
            lambda: x.to(torch.float64).to(torch.float32),
            lambda: torch.cat([x.flatten(), y.flatten()[:3]]),
            lambda: torch.stack([x, x]),
            lambda: x.sum(0) if x.dim() else x,
            lambda: -x,
            lambda: x * torch.ones(()),
            lambda: torch.where(x > 3, x, torch.zeros(())),
            lambda: x.remainder(7),
        ]
        result = choices[c % len(choices)]()
        if result.numel() <= 200:
            self.pool.append(result)

    def write(self, a: int, b: int, c: int) -> None:
        x = self.pick(a)
        if 0 in x.stride() or (x._base is not None and 0 in x.stride()):
            return  # writes to broadcast views are refused by torch itself
        choices: list[Any] = [
            lambda: x.zero_(),
            lambda: x.add_(1),
            lambda: x.fill_(c % 10),
            lambda: x.remainder_(5),
            lambda: x.copy_(self.pick(b).sum()),
            lambda: x.view(-1)[:1].fill_(4) if x.is_contiguous() and x.numel() else None,
        ]
        choices[(b + c) % len(choices)]()

    def read(self, a: int, b: int, c: int) -> None:
        x = self.pick(a)
        choices: list[Any] = [
            lambda: float(x.sum()),
            lambda: x.tolist(),
            lambda: bool((x >= 0).all()),
            lambda: x.numpy().tolist(),
            lambda: copy.deepcopy(x).tolist(),
            lambda: [*x.shape, *x.stride()],
            lambda: torch.equal(x, self.pick(b)),
        ]
        self.log.append(choices[c % len(choices)]())

    def touch_parameter(self, a: int, b: int, c: int) -> None:
        x = self.pick(a)
        flat, grid = self.model.flat.data, self.model.grid.data
        start = b % 100
        choices: list[Any] = [
            lambda: self.log.append(float(flat[start : start + 20].sum())),
            lambda: flat[start : start + 7].fill_(2),
            lambda: grid[:, c % 16].zero_(),
            lambda: flat[:48].copy_(flat[100:148]),
            lambda: self.log.append(grid[c % 12].tolist()),
            lambda: self.log.append(float(flat.numpy()[start])),
            lambda: flat[start].add_(x.sum()),
            lambda: self.pool.append(flat[start : start + 5].clone()),
            lambda: self.model.buffer.data.copy_(grid.flatten()[:48]),
            lambda: flat[start : start + 3].remainder_(13),
            lambda: flat[start:start].fill_(1),
        ]
        choices[c % len(choices)]()


def program(steps: list[Step], *, listed: bool) -> Loader:
    """Return a loading function that does `steps`, spread over the tensors as they come."""

    def loader(model: Any, weights: Any) -> list[object]:
        run = Interpreter(model)
        source = iter(list(weights)) if listed else iter(weights)
        run.pool.append(next(source)[1])
        remaining = list(steps)
        per_tensor = len(steps) // len(SHAPES)
        for _, tensor in source:
            for step in remaining[:per_tensor]:
                run.step(*step)
            del remaining[:per_tensor]
            run.pool.append(tensor)
        for step in remaining:
            run.step(*step)
        return run.log

    return loader


@settings(max_examples=400, deadline=None)
@given(
    steps=st.lists(st.tuples(*[st.integers(0, 200)] * 4), min_size=12, max_size=60),
    listed=st.booleans(),
    cap=st.sampled_from(["64KiB", "1MiB"]),
)
def test_traced_and_plain_programs_agree(steps: list[Step], listed: bool, cap: str) -> None:
    load_all_ways(program(steps, listed=listed), PARAMETERS, STATE, buffer_bytes=cap)
