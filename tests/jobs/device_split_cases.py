"""Cases of models partitioned over devices, in a process with two logical CPU devices; run as a script.

They must be made before TensorFlow starts, so this is a child of `test_device_split_tensorflow.py`: first the command
line, which makes them, then everything else in the same process.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import sys
import time
from collections import Counter
from pathlib import Path

import device_split_refusals
import numpy as np
from device_split_tools import (
    CONFIG,
    arrays,
    built,
    close,
    data_of,
    refused,
    sample,
    sequential,
    short,
    spec_of,
    split,
    step_of,
    train,
    where,
)
from safetensors.numpy import load_file

from hvdtrain.commands import main as command
from hvdtrain.config import Named


def batches_of(spec, n=20, steps=3):
    rng = np.random.default_rng(1)
    x, y = spec.example(n)
    return [(x, y), *((x[i], y[i]) for i in (rng.permutation(n) for _ in range(steps - 1)))]


# --- cases -----------------------------------------------------------------------------------------------------------


def case_command_line(folder):
    """Check that the command makes the devices, prints the partition before training and both bubbles after it."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        command(["train", "--model", "tf_models.mlp:build", "--model_parallel", "2", "--max_steps", "8", "--eval_every",
                 "0", "--out", f"{folder}/cli", "--checkpoint.at_end", "true", "--progress", "plain"])
    text = told.getvalue()
    assert "model partitioned over 2 devices, a micro-batch in 8 parts" in text and "/CPU:1" in text, text
    assert text.index("model partitioned over") < text.index("step 1"), text
    assert "predicted" in text.split("| bubble")[1].splitlines()[0] and "measured" in text, text
    assert Path(folder, "cli/completed.json").exists() and Path(folder, "cli/model/model.keras").exists()


def case_resume_without_a_split(folder):
    """Check that a training on two devices resumes on one, and then on two again, as if never split."""
    common = ["train", "--model", "tf_models.mlp:build", "--eval_every", "0", "--checkpoint.at_end", "true",
              "--progress", "plain"]

    def told_of(*more):
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            command([*common, *more])
        return told.getvalue()

    text = told_of("--max_steps", "10", "--out", f"{folder}/cli", "--resume", "auto")
    assert "resumed at step 8" in text and "split" not in text, text
    text = told_of("--max_steps", "12", "--out", f"{folder}/cli", "--resume", "auto", "--model_parallel", "2")
    assert "resumed at step 10" in text and "model partitioned over 2 devices" in text, text
    told_of("--max_steps", "12", "--out", f"{folder}/whole")
    close(*(load_file(f"{folder}/{name}/model/model.safetensors") for name in ("cli", "whole")))


def case_models_equal_one_device(folder):
    """mlp, cnn and gpt on two devices: losses, weights, slots, metrics as on one; each tensor on its device."""
    sgd = dataclasses.replace(CONFIG, optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1)  # Adam makes much of rounding
    for name, args, config, micros, pieces in (("mlp", {}, CONFIG, 3, 4), ("cnn", {}, CONFIG, 1, 2),
                                               ("gpt", {"depth": 1, "width": 32}, sgd, 1, 2)):
        one = built(name, **args)
        weight = (lambda x: x.size) if name == "gpt" else len
        data = [(x, np.abs(y)) for x, y in batches_of(one)]
        config = dataclasses.replace(config, accumulate=micros)
        whole = step_of(one, config)
        losses = train(whole, data, micros, weight=weight)
        parts = step_of(built(name, **args), split(config, split_micro_batches=pieces))
        close({"losses": train(parts, data, micros, weight=weight)}, {"losses": losses})
        close(arrays(parts), arrays(whole))
        for step in (whole, parts):
            step.evaluate(data[0])
        close(parts.eval_results(parts.eval_totals()), whole.eval_results(whole.eval_totals()))
        assert_places(parts)


def case_what_no_gradient_reaches_stays(folder):
    """Layers that the loss does not read keep their weights, and AdamW's state of them, as on one device."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
    from unused_keras import chain

    config = dataclasses.replace(CONFIG, optimizer=Named("adamw", {"weight_decay": 0.3}), loss=Named("mse"))
    x = np.random.default_rng(0).standard_normal((20, 12)).astype(np.float32)
    spec = spec_of(chain(), example=lambda n: (x[:n], x[:n, :4]))
    first = [v.numpy() for v in spec.model.weights]
    whole, parts = step_of(spec, config), step_of(dataclasses.replace(spec, model=chain()), split(config))
    for step in (whole, parts):
        train(step, [(x, x[:, :4])] * 2)
    assert parts.stage.unused == whole.stage.unused == frozenset((2, 3, 4, 5, 8, 9))
    close(arrays(parts), arrays(whole))
    for i in parts.stage.unused:
        np.testing.assert_array_equal(parts.model.weights[i].numpy(), first[i])


def assert_places(step):
    """Variables, slots, gradients, accumulators and every operation of a block, on the device of its stage."""
    chain, plan = step.stage._gradients.split.chain, step.stage._gradients.split.plan
    names = [short(d) for d in plan.devices]
    for layer, i in zip(chain.layers, range(len(chain.layers))):
        assert set(where(layer.variables)) <= {names[plan.stage_of(i)]}, chain.names[i]
    trainable = step.model.trainable_variables
    assert set(where(trainable)) == {"CPU:0", "CPU:1"}
    assert [f"CPU:{p.place}" for p in step.params()] == where(trainable)
    optimizer = step.optimizer.own
    slots = [held for name, held in vars(optimizer).items() if name in (
        "momentums", "_momentums", "_velocities", "_model_variables_moving_average") and held]
    assert len(slots) == (1 if "SGD" in type(optimizer).__name__ else 3)
    for held in slots:
        assert where(held) == where(trainable)
    assert [short(a.device) for a in step.stage._gradients._sums] in ([], where(trainable))
    assert [short(t.backing_device) for t in step.grads] == where(trainable)
    graph = next(f for f in step.stage.calls._graphs.values()).graph
    seen = Counter()
    for op in graph.get_operations():
        scopes = [scope for scope in op.name.split("/") if not scope.startswith(("gradient_tape", "phase"))]
        home = scopes[0] if scopes else ""
        block = next((i for i, name in enumerate(chain.names) if home == name or home.removeprefix(name + "_").isdigit()
                      and home.startswith(name + "_")), None)
        if block is not None and op.device:
            assert short(op.device) == names[plan.stage_of(block)], (op.name, op.device)
            seen[block] += 1
    assert len(seen) == len(chain.names), seen


def case_copies_only_at_the_cut(folder):
    """Check what is copied between devices: activations, their gradients, targets, single numbers."""
    from tensorflow.python.eager import context

    spec = built("mlp")
    step = step_of(spec, split(CONFIG))
    context.context().enable_graph_collection()
    train(step, batches_of(spec, steps=1))
    graphs = [g for f in context.context().export_run_metadata().function_graphs for g in f.partition_graphs]
    context.context().disable_graph_collection()
    chain, plan = step.stage._gradients.split.chain, step.stage._gradients.split.plan
    last = chain.names[plan.stages[0].stop - 1]
    sent = Counter()
    for graph in graphs:
        operation = {node.name: node.op for node in graph.node}
        for node in graph.node:
            source = node.input[0].split(":")[0].lstrip("^") if node.input else ""
            if node.op not in ("_Send", "_HostSend") or "/ctrl" in source:
                continue
            stem = source.removeprefix("gradient_tape/").split("/")[0]
            if any(stem == n or stem.startswith(n + "_") for n in chain.names):
                kind = "back" if source.startswith("gradient_tape/") else "forward"
                sent[kind, short(node.device)] += 1
                assert kind == "back" or stem.startswith(last), source
            elif stem.startswith("strided_slice"):
                sent["targets", short(node.device)] += 1
            else:  # numbers: the scale, the rate, the norm's parts, the clipping's factor
                assert "kernel" not in source and operation.get(source) != "MatMul", source
                sent["numbers", short(node.device)] += 1
    assert sent["forward", "CPU:0"] == sent["back", "CPU:1"] == sent["targets", "CPU:0"] == 4, sent
    assert set(sent) <= {("forward", "CPU:0"), ("back", "CPU:1"), ("targets", "CPU:0"), ("numbers", "CPU:0"),
                         ("numbers", "CPU:1")}, sent


def case_by_hand(folder):
    """tf_models/device_split.py trains its 784 -> 512 | 10 and shows where each variable is."""
    from tf_models import device_split

    told, here = io.StringIO(), os.getcwd()
    os.chdir(folder)  # it makes a runs folder where it is started
    try:
        with contextlib.redirect_stdout(told):
            device_split.main()
    finally:
        os.chdir(here)
    text = told.getvalue()
    assert "device_split/first/kernel (784, 512) on CPU:0" in text, text
    assert "device_split/second/kernel (512, 10) on CPU:1" in text, text
    assert float(text.split("| test accuracy |")[1].split()[0]) > 0.9, text


def case_losses_of_layers_and_weights_of_samples(folder):
    """Regularisers on both stages, sample weights, a frozen layer; a compiled model whose optimizer has a history."""
    import keras

    def compiled():
        model = sequential(lambda: keras.layers.Dense(16, trainable=False))
        model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(*data_of(8, 1)[0], verbose=0)
        return model

    config = dataclasses.replace(CONFIG, optimizer=Named())
    whole, parts = step_of(spec_of(compiled()), config), step_of(spec_of(compiled()), split(config), sample=sample)
    data = data_of(weighted=True)
    close({"losses": train(parts, data)}, {"losses": train(whole, data)})
    close(arrays(parts), arrays(whole))
    optimizer = parts.optimizer.own
    assert optimizer is parts.model.optimizer
    assert where(optimizer._momentums) == where(parts.model.trainable_variables)
    assert int(optimizer.iterations.numpy()) == 4


def case_fewer_samples_than_parts(folder):
    """1, 2, 3 and 5 samples in up to 4 parts."""
    whole, parts = step_of(spec_of(sequential()), CONFIG), step_of(spec_of(sequential()), split(), sample=sample)
    for n in (1, 2, 3, 5):
        data = data_of(n, 1)
        close({"losses": train(parts, data)}, {"losses": train(whole, data)})
    close(arrays(parts), arrays(whole))
    assert {kind[0][1] for kind, _ in parts.stage.calls._graphs} == {1, 2, 4}


def case_narrow_types(folder):
    """bf16 and scaled fp16 on two devices give about what they give on one."""
    for own, tolerance in (("bf16", 0.05), ("fp16", 0.02)):
        config = dataclasses.replace(CONFIG, precision=own, loss_scale=1024.0)
        whole = step_of(spec_of(sequential()), config, own)
        parts = step_of(spec_of(sequential()), split(config), own, sample)
        data = data_of(steps=2)
        close({"losses": train(parts, data)}, {"losses": train(whole, data)}, tolerance)
        for step in (whole, parts):
            step.leave()
        assert parts.model.layers[0].compute_dtype == "float32" and "call" not in vars(parts.model.layers[0])
        parts.join()
        assert "call" in vars(parts.model.layers[0])
        parts.leave()


def case_dropout_batchnorm_and_a_trial(folder):
    """Both run and are told as caveats; a trial and the measuring leave no trace; a step can be undone."""
    import keras

    def made():
        return sequential(keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.5, seed=1))

    fresh = {v.path: v.value.numpy() for v in made().weights}
    step = step_of(spec_of(made()), split(nan_guard="skip"), sample=sample)
    close({v.path: v.value.numpy() for v in step.model.weights}, fresh, 0)
    before = {**arrays(step), **step.rank_state()}
    step.trial(sample(20))
    after = {**arrays(step), **step.rank_state()}
    for a, b in zip(before.values(), after.values()):
        np.testing.assert_array_equal(a, b)
    told = " ".join(step.caveats())
    assert "statistics over each part" in told and "draws differ with split_micro_batches" in told
    step.zero()
    step.forward_backward(sample(20), 1 / 20, True)
    step.exchange()
    moved = step.state()[0]["model"]
    assert any(not np.array_equal(moved[k], before[k]) for k in moved if "moving" in k)
    step.discard()
    assert all(np.array_equal(a, before[k]) for k, a in step.state()[0]["model"].items())
    train(step, data_of())
    refused("sync_batchnorm with model_parallel", lambda: step_of(
        spec_of(made()), split(sync_batchnorm=True), sample=sample))


def case_a_functional_row_and_its_file(folder):
    """Check that a functional model's .keras file, and a checkpoint, hold what two devices trained."""
    import keras

    keras.utils.set_random_seed(5)
    x = keras.Input((12,))
    model = keras.Model(x, keras.layers.Dense(5)(keras.layers.Dense(8, activation="relu")(x)))
    step = step_of(spec_of(model), split(), sample=sample)
    train(step, data_of())
    groups, rest = step.state()
    again = step_of(spec_of(keras.models.clone_model(model)), CONFIG)
    again.load(groups, rest)
    ours, theirs = train(step, data_of()), train(again, data_of())
    close({"losses": ours}, {"losses": theirs})
    os.makedirs(f"{folder}/export")
    averaged = [v.numpy() for v in step.optimizer.own._model_variables_moving_average]
    step.export(f"{folder}/export")
    loaded = keras.models.load_model(f"{folder}/export/model.keras")
    for got, want in zip(loaded.trainable_variables, averaged):
        np.testing.assert_array_equal(got.value.numpy(), want)


def case_variables_are_lent(folder):
    """Check that timing a block on another device, by copies of its variables, changes none of them."""
    from hvdtrain.backends.tensorflow.placement import lent

    spec = built("mlp")
    before = [v.value for v in spec.model.weights]
    values = [v.numpy() for v in before]
    with lent(spec.model.weights, "/CPU:1"):
        assert set(where(spec.model.weights)) == {"CPU:1"}
        for v, value in zip(spec.model.weights, values):
            np.testing.assert_array_equal(v.value.numpy(), value)
            v.assign(value + 1)
    assert all(v.value is own for v, own in zip(spec.model.weights, before))
    for v, value in zip(spec.model.weights, values):
        np.testing.assert_array_equal(v.value.numpy(), value)


def case_twins_have_the_curve_of_one_device(folder):
    """Train a twin of each kind of layer that is not above (bert's are gpt's); tied weights are refused."""
    tokens = {"vocab": 96, "context": 64, "width": 16, "depth": 1, "heads": 2}
    sizes = {"lstm": {"features": 8, "width": 12}, "resnet": {"in_shape": (8, 8, 3), "width": 8, "depth": 1},
             "vit": {"in_shape": (8, 8, 3), "patch": 4, "width": 16, "depth": 1, "heads": 2}}
    sgd = dataclasses.replace(CONFIG, optimizer=Named("sgd", {"momentum": 0.9}), lr=0.1)
    for name, args in sizes.items():
        x, y = importlib.import_module(f"tf_models.{name}").example(14)
        x = x[:, :8, :8] if "in_shape" in args else x[:, :4] if name == "lstm" else x
        batches = [(x[:7], y[:7]), (x[7:], y[7:])]  # of one shape: a graph for each takes longest
        config = sgd if name == "vit" else CONFIG  # Adam makes much of the keys' biases, which are rounding
        whole = step_of(built(name, **args), config)
        parts = step_of(built(name, **args), split(config, split_micro_batches=2), sample=lambda n: (x[:n], y[:n]))
        close({"losses": train(parts, batches)}, {"losses": train(whole, batches)})
        close(arrays(parts), arrays(whole))
        assert set(where(parts.model.weights)) == {"CPU:0", "CPU:1"}, name
    for name in ("bert", "gpt"):
        refused("blocks embed and head share", lambda: step_of(built(name, **tokens, tied=True), split()))


def main():
    folder = sys.argv[1]
    for name, case in [*globals().items(), *vars(device_split_refusals).items()]:
        if name.startswith("case_") and (len(sys.argv) < 3 or name in sys.argv[2:]):
            begin = time.perf_counter()
            case(folder)
            print(f"passed {name} in {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
