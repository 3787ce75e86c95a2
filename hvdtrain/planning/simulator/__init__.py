"""Simulate a training step and a job from measured costs: `step(scene)`, `job(scene, steps)`. Pure.

The types of a scene are in `scene`; measuring them is left to the callers.
"""

from hvdtrain.planning.simulator.events import (
    JobForecast,
    StepForecast,
    delayed_s,
    host_links,
    job,
    short_of_cores,
    step,
)
from hvdtrain.planning.simulator.scene import Exchange, Failures, Host, Rank, Saves, Scene, Stages, save_interval_s

__all__ = ["Exchange", "Failures", "Host", "JobForecast", "Rank", "Saves", "Scene", "Stages", "StepForecast",
           "delayed_s", "host_links", "job", "save_interval_s", "short_of_cores", "step"]
