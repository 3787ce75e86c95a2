"""The moments of a run that callbacks see. This docstring is the training loop.

```text
FIT_START                                          # may refuse: nothing in the run's directory has changed so far
the run begins: config.yaml                        # not where a finished run has nothing left to train
while epoch < epochs:
    EPOCH_START
    for global batch t of this epoch:              # hvdtrain.data.feed: a function of (seed, t) only
        STEP_START
        for each micro-batch of this rank's part:  # none, when this rank holds no sample of the batch
            forward, backward of loss_sum / W      # W: global weight of batch t
        exchange the gradients (sum)               # begins during the last backward
        vote: loss, gradient finite? stop? save? anything to tell?   # one small sum, the same on every rank
        if a rank ran out of memory: TOLD, and again from forward, as if nothing had been
        if a loss or the summed gradient is not finite: NON_FINITE, no update
        clip, update
        reduce the buffers that forward passes write to    # hvdtrain.engine.written_state; nothing without any
                                                   # an overflow in fp16: no update, a lower loss scale, no event
        if a rank had something to tell: TOLD      # run.tell_all(topic, text) -> run.state.told, on every rank
        STEP_END
        if evaluation is due after this step:      # eval_steps
            EVAL_END
            agree on wishes to stop
        if a checkpoint is due:
            CHECKPOINT                             # snapshot written by rank 0
    if evaluation is due, and not of this step already:
        EVAL_END                                   # exact sums over uneven shards
    EPOCH_END
    if a checkpoint is due: CHECKPOINT             # set in EVAL_END or EPOCH_END
    if an agreement to stop was cast: break
FIT_END                                            # also after a stop; callbacks save last
FIT_SAVED                                          # a change of the model is not what training continues from
```

Order. After a step's update come STEP_END, EVAL_END where ``eval_steps`` asks for it, and CHECKPOINT; after those of
the last step of an epoch EVAL_END, EPOCH_END and CHECKPOINT again. The loop changes no weights from STEP_END to the
next STEP_START: checkpoint and evaluation have those of STEP_END.

Checkpoints. Set ``run.state.save_due`` in STEP_END, EVAL_END or EPOCH_END, on every rank: the checkpoint of that step
follows. TOLD within a step is as good; outside of a step it is a wish for the next. Elsewhere setting it raises
`UserError`, since the next checkpoint holds the weights of the next step. A rank by itself calls ``run.want_save()``,
in any event: the next agreement decides for all.

Exchanges. A callback with ``where = "all"`` may enter collectives of ``run.control`` in every event, the same ones in
the same order on every rank, for reasons that all ranks know (laws 5 and 6). Collectives of gradients are free in
FIT_START and STEP_END, when those of the step are complete. A callback with ``where = "root"`` enters none: where there
are other ranks, which would not come, that raises `UserError`; inside of a TensorFlow graph nobody notices. The same
holds for its methods outside of events: ``saving``, ``continued`` and ``close``.

A callback that is added to ``run.callbacks`` during an event sees the next one.
"""

from __future__ import annotations

import enum


class Event(enum.Enum):
    """Names of the moments; a callback implements the method of the same lower-case name."""

    FIT_START = "fit_start"
    EPOCH_START = "epoch_start"
    STEP_START = "step_start"
    NON_FINITE = "non_finite"
    TOLD = "told"
    STEP_END = "step_end"
    CHECKPOINT = "checkpoint"
    EVAL_END = "eval_end"
    EPOCH_END = "epoch_end"
    FIT_END = "fit_end"
    FIT_SAVED = "fit_saved"
