"""Simulate a training step and a job from measured costs: `step(scene)`, `job(scene, steps)`. Pure.

The types of a scene are in `scene`; measuring them is left to the callers.
"""

from hvdtrain.planning.simulator.events import JobForecast, StepForecast, host_links, job, step
from hvdtrain.planning.simulator.scene import Exchange, Failures, Host, Rank, Saves, Scene, Stages

__all__ = ["Exchange", "Failures", "Host", "JobForecast", "Rank", "Saves", "Scene", "Stages", "StepForecast",
           "host_links", "job", "step"]
