"""The budget that learned policies make: Learning to Draft at decoding time.

Source: arXiv 2603.01639.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.budgets import Budget, FixedBudget, Growth
from decoding.ltd.observations import Observer
from decoding.policies.policy import Policy, PolicyArtifact, PolicyError

GO_ON = 1
"""The depth policy's action that drafts another level; 0 stops."""
SETTINGS = ("sizes", "nodes", "depth", "top_k", "every", "observation", "fixed_nodes", "fixed_depth")
"""What an artifact's settings must hold."""


@dataclass(frozen=True)
class LearnedBudget:
    """Asks a policy whether to draft another level, and another one how many nodes to keep; each takes the likeliest
    action."""

    depth_policy: Policy | None
    """None: `fallback` decides the depth."""
    size_policy: Policy | None
    """None: `fallback` decides the size."""
    observer: Observer
    sizes: tuple[int, ...]
    """What the size policy chooses from."""
    nodes: int
    """Most nodes of a tree."""
    depth: int
    """Most levels."""
    every: int
    """Only each n-th level is asked about; at the others the tree grows on."""
    fallback: Budget
    """Decides where there is no policy."""

    def __post_init__(self) -> None:
        wanted = {
            "depth": (self.depth_policy, self.observer.depth_features, 2),
            "size": (self.size_policy, self.observer.size_features, len(self.sizes)),
        }
        for name, (policy, features, actions) in wanted.items():
            if policy is not None and (policy.features, policy.actions) != (features, actions):
                raise PolicyError(
                    f"the {name} policy takes {policy.features} features and has {policy.actions} actions; with these "
                    f"settings it must take {features} and have {actions}: train it again"
                )
        if not self.sizes or min(self.sizes) < 1 or min(self.nodes, self.depth, self.every) < 1:
            raise PolicyError(
                f"sizes {self.sizes}, nodes {self.nodes}, depth {self.depth}, every {self.every}: all must be 1 or more"
            )

    @classmethod
    def of(cls, artifact: PolicyArtifact) -> LearnedBudget:
        """As the artifact's policies were trained. Raises PolicyError where its settings are not those of `ltd`."""
        return cls.made(artifact.networks.get("depth"), artifact.networks.get("size"), artifact.settings)

    @classmethod
    def made(cls, depth: Policy | None, size: Policy | None, settings: Any) -> LearnedBudget:
        """Of policies and the settings that an artifact keeps. Raises PolicyError where they do not fit."""
        missing = [name for name in SETTINGS if name not in settings]
        if missing:
            raise PolicyError(f"the settings of a learned tree lack {', '.join(missing)}: train the policy again")
        try:
            sizes: Sequence[int] = [_count(v) for v in settings["sizes"]]
            counts = {n: _count(settings[n]) for n in SETTINGS if n not in ("sizes", "observation")}
            observer = Observer(settings["observation"], counts["top_k"], counts["depth"])
        except (TypeError, ValueError) as error:
            raise PolicyError(
                f"the settings of a learned tree are damaged ({error}): train the policy again"
            ) from error
        fallback = FixedBudget(counts["fixed_nodes"], min(counts["fixed_depth"], counts["depth"]))
        return cls(
            depth, size, observer, tuple(sizes), counts["nodes"], counts["depth"], counts["every"], fallback
        )  # fmt: skip

    def go_on(self, growth: Growth) -> bool:
        if growth.depth >= self.depth:
            return False
        if self.depth_policy is None:
            return self.fallback.go_on(growth)
        if growth.depth % self.every:
            return True
        stop, more = self.depth_policy(self.observer.to_depth(growth))[0].tolist()
        return bool(more > stop)

    def size(self, growth: Growth) -> int:
        if self.size_policy is None:
            return min(self.fallback.size(growth), self.nodes)
        action = int(self.size_policy(self.observer.to_size(growth)).argmax())
        return min(self.sizes[action], self.nodes)


def _count(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is no count")
    return value
