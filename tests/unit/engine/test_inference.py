"""Outputs in the order of the data, each sample once: on uneven ranks, of nested outputs, with and without targets."""

import numpy as np
import pytest
from small_runs import FEATURES, SLOW_TENSORFLOW, config, lockstep, make_model, samples

from hvdtrain import Trainer
from hvdtrain.comm.collectives.lockstep import LockstepWorld
from hvdtrain.core.errors import UserError
from hvdtrain.data.layout import named_outputs
from hvdtrain.data.sources import Unreadable
from hvdtrain.engine import build_model, inference

X, Y = samples(11)


class Chunks:
    """A stream without targets."""

    def chunks(self, epoch):
        yield from ((X[i:i + 3],) for i in range(0, len(X), 3))


def predicted(control, batch, data, model):
    made = inference.assemble(config(global_batch=batch), model, data, labels=False, control=control)
    outputs = inference.Collected()
    n = inference.predict(control, made.parts, made.feed, made.recovery, outputs.write)
    return n, outputs.result() if control.rank == 0 else None


@pytest.mark.parametrize("data", [X, (X, Y), Chunks()], ids=["x", "x and y", "stream"])
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_ranks_give_the_outputs_of_one_rank_in_order(batch, data):
    """With a batch of 1 two ranks of three have no sample; the last batches are short; windows are several."""
    model = make_model("numpy")
    rows = LockstepWorld(3).run(lambda control, wire: predicted(control, batch, data, model), timeout_s=30.0)
    assert [n for n, _ in rows] == [11] * 3
    assert np.allclose(rows[0][1], model.forward(X)[-1], atol=1e-12) and rows[1][1] is None


def test_a_rank_that_fails_ends_all_with_its_message():
    models = [make_model("numpy") for _ in range(2)]

    def refuse(x):
        raise UserError("no", "yes", "try")

    models[1].forward = refuse

    def rank(control, wire):
        with pytest.raises(UserError, match="rank 1 on host .*: no") as found:
            predicted(control, 4, X, models[control.rank])
        return str(found.value)

    assert len(set(LockstepWorld(2).run(rank, timeout_s=30.0))) == 1


def test_ranks_evaluate_as_one_rank():
    model = make_model("numpy")

    def rank(control, wire):
        return inference.evaluate(inference.assemble(config(global_batch=4), model, (X, Y), control=control))

    rows = LockstepWorld(3).run(rank, timeout_s=30.0)
    alone = LockstepWorld(1).run(rank, timeout_s=30.0)[0]
    assert rows[0] == rows[2] and alone[1] == rows[0][1] == 11
    assert rows[0][0] == pytest.approx(alone[0])
    assert alone[0] == pytest.approx(Trainer(config()).evaluate(model=model, data=(X, Y)))


def test_outputs_have_the_names_of_their_places():
    a = np.zeros(2)
    found = {"b": (a, None, [a]), "c": a}
    assert list(named_outputs(found, np.asarray)) == ["b.0", "b.2.0", "c"]
    assert list(named_outputs((a, {"x": a}), np.asarray)) == ["output_0", "output_1.x"]
    with pytest.raises(UserError, match="two of the model's outputs have the name b.c"):
        named_outputs({"b.c": a, "b": {"c": a}}, np.asarray)
    with pytest.raises(UserError, match="output c is a str"):
        named_outputs({"c": "text"}, np.asarray)


@pytest.mark.parametrize("framework", SLOW_TENSORFLOW)
def test_a_trainer_predicts_before_and_after_a_fit_and_leaves_the_model_as_it_was(framework, tmp_path):
    model, trainer = make_model(framework), Trainer(config(max_steps=2, global_batch=4, out=str(tmp_path / "run")))
    before = trainer.predict(X, model=model)
    assert before.shape == (11, 5) and np.allclose(before, trainer.predict((X, Y), model=model), atol=1e-6)
    trainer.fit(model, ((X, Y), (X, Y)))
    after = trainer.predict(X)
    assert np.allclose(trainer.predict(), after, atol=1e-6) and np.abs(after - before).max() > 1e-4
    with pytest.raises(UserError):
        trainer.predict(X[:, :FEATURES - 1])


def torch_model(kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = torch.nn.Linear(FEATURES, 2), torch.nn.Dropout(0.5)

        def forward(self, x):
            y = self.layer(self.drop(x))
            return {"dict": {"y": y.bfloat16(), "first": y[:, 0]}, "scalar": {"mean": y.mean()}}[kind]

    return Net().train()


def test_outputs_of_pytorch_in_a_dict():
    model = torch_model("dict")
    found = Trainer(config(global_batch=4)).predict(X, model=model)
    want = X @ model.layer.weight.detach().numpy().T + model.layer.bias.detach().numpy()
    assert found["y"].dtype == np.float32 and np.allclose(found["y"], want, atol=0.05)
    assert np.allclose(found["first"], want[:, 0], atol=1e-6) and model.training and model.drop.training
    with pytest.raises(UserError, match=r"output mean has the shape \[\] for a batch of 4"):
        Trainer(config(global_batch=4)).predict(X, model=torch_model("scalar"))


def test_a_keras_model_with_nested_inputs_and_outputs():
    keras = pytest.importorskip("keras", reason="Keras is not installed")
    pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    a, b = keras.Input((FEATURES,), name="a"), keras.Input((2,), name="b")
    model = keras.Model({"a": a, "b": b}, {"sum": keras.layers.Add()([keras.layers.Dense(2)(a), b]), "b": b})
    x = {"a": X, "b": X[:, :2]}
    want = model(x)
    trainer = Trainer(config(global_batch=4))
    for data in ({"x": x}, (x, {"sum": X[:, :2], "b": X[:, :2]})):
        found = trainer.predict(data, model=model)
        assert sorted(found) == ["b", "sum"] and np.allclose(found["sum"], want["sum"], atol=1e-6)
        assert np.array_equal(found["b"], x["b"])


def test_a_model_file_with_a_task_predicts_by_its_own_function(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    source = ("import torch\n\ndef build():\n    return torch.nn.Linear({0}, 2)\n\n"
              "def task(model, batch):\n    return (model(batch[0] * 2) ** 2).sum(), len(batch[0])\n").format(FEATURES)
    (tmp_path / "plain.py").write_text(source)
    own = "\ndef predict(model, batch):\n    return model(batch[0] * 2), batch[0]\n"
    (tmp_path / "own.py").write_text(source + own)
    found = Trainer(config(model=f"{tmp_path}/own.py:build", global_batch=4)).predict(X)
    assert np.array_equal(found["output_1"], X) and "no predict(model, batch)" not in capsys.readouterr().out
    Trainer(config(model=f"{tmp_path}/plain.py:build", global_batch=4, progress="auto")).predict(X)
    assert "the model file has a task and no predict(model, batch)" in capsys.readouterr().out


def test_where_evaluation_skips_a_sample_predict_ends_on_every_rank(tmp_path):
    class Files:
        def __len__(self):
            return len(X)

        def fetch(self, numbers):
            if 5 in numbers:
                raise Unreadable(5, "five.png", "broken")
            return X[numbers], Y[numbers]

    def work(run):
        feed = build_model.predict_feed(run, None)
        with pytest.raises(UserError, match="rank 0 on host .*: sample 5 cannot be read: five.png: broken"):
            inference.predict(run.control, run.parts, feed, run.recovery, lambda outputs: None)

    settings = config(global_batch=4, on_bad_sample="skip", out=str(tmp_path))
    lockstep(2, settings, lambda rank: make_model("numpy"), ((X, Y), Files()), work)
