"""A stream that one rank of the host reads: each sample decoded once, bits and resume as where all ranks read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_runs import FRAMEWORKS, bits, config, fitted, make_model, samples

from hvdtrain.config import CheckpointConfig, DataConfig
from hvdtrain.core.errors import UserError
from hvdtrain.engine.assemble import assemble

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.timeout(120), pytest.mark.world_size(2, 3)]
N, BATCH, EPOCHS = 150, 16, 2


@pytest.fixture(params=FRAMEWORKS)
def framework(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


class Rows:
    """Samples in order, counted as they are decoded; ``bad``: the sample at which a user's mistake shows."""

    def __init__(self, bad=-1):
        self.x, self.y = samples(N)
        self.decodes, self.bad = 0, bad

    def __call__(self):
        for number, row in enumerate(zip(self.x, self.y)):
            if number == self.bad:
                raise UserError("row 70 is bad", "a good row", "fix it")
            self.decodes += 1
            yield row

    def of(self, framework):
        """Return the framework's own stream of the rows."""
        if framework == "tensorflow":
            import tensorflow as tf

            spec = tf.TensorSpec(self.x.shape[1:], "float32"), tf.TensorSpec((), "int64")
            return tf.data.Dataset.from_generator(self, output_signature=spec).shuffle(20, seed=3)
        import torch

        class Stream(torch.utils.data.IterableDataset):
            def __iter__(stream):
                return iter(self())

        return Stream()


def trained(control, framework, settings, readers, bad=-1):
    """Return a run that has ended, and how many samples all ranks have decoded."""
    rows = Rows(bad)
    run = assemble(replace(settings, data=DataConfig(prefetch=2, workers=0, readers=readers)), make_model(framework),
                   rows.of(framework))
    fitted(run)
    return run, control.gather(rows.decodes)


@pytest.mark.tensorflow_size(2)
def test_one_rank_of_a_host_decodes_a_stream(control, framework, tmp_path):
    """To the bits of ranks that all read, also after a resume within an epoch."""
    out = control.bcast(str(tmp_path))
    settings = config(global_batch=BATCH, epochs=EPOCHS, out=f"{out}/each",
                      shares=[2.0] + [1.0] * (control.size - 1))
    each, decodes = trained(control, framework, settings, "each")
    assert decodes == [EPOCHS * N] * control.size
    host, decodes = trained(control, framework, replace(settings, out=f"{out}/host"), "host")
    assert decodes == [EPOCHS * N] + [0] * (control.size - 1)
    assert len({*control.gather(bits(host)), bits(each)}) == 1
    assert any("rank 0 for rank" in note for note in host.notes)
    auto, decodes = trained(control, framework, replace(settings, out=f"{out}/auto"), "auto")
    assert bits(auto) == bits(each) and decodes[0] == EPOCHS * N and max(decodes[1:]) <= 64 + 20  # to compare

    stopped = replace(settings, out=f"{out}/stopped", max_steps=13, checkpoint=CheckpointConfig(at_end=True))
    trained(control, framework, stopped, "host")
    resumed, decodes = trained(control, framework, replace(stopped, max_steps=0, resume="auto"), "host")
    assert bits(resumed) == bits(each) and decodes[1:] == [0] * (control.size - 1)
    assert control.rank or any("48 samples of epoch 1 are read again" in note for note in resumed.notes)


def test_a_bad_row_ends_all_ranks_with_one_message(control, framework, tmp_path):
    if framework == "tensorflow":
        pytest.skip("tf.data wraps the errors of a generator in its own")
    settings = config(global_batch=BATCH, epochs=1, out=control.bcast(str(tmp_path)))
    with pytest.raises(UserError, match="row 70 is bad") as error:
        trained(control, framework, settings, "auto", bad=70)
    assert len(set(control.gather(str(error.value)))) == 1
