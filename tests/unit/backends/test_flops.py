"""Operations of a sample and the share of a peak that a run uses: the same in both frameworks, printed only if known.
"""

import doctest
import math
from types import SimpleNamespace

import numpy as np
import pytest
from small_runs import CLASSES, FEATURES, FRAMEWORKS, HIDDEN, bits, config, fitted, make_model, samples, solo

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.engine import machine as flops
from hvdtrain.engine import machine as peaks
from hvdtrain.engine import summary

PACKAGE = {"torch": "torch_models", "tensorflow": "tf_models"}
GPT = {"width": 8, "depth": 1, "heads": 2, "context": 4, "vocab": 6, "dropout": 0.1}
CNN = {"in_shape": (8, 8), "channels": (4,), "classes": 5, "norm": "batch"}
DRAW = np.random.default_rng(0)
DATA = {"gpt": (DRAW.integers(0, 6, (8, 4)), DRAW.integers(0, 6, (8, 4))),
        "cnn": (DRAW.standard_normal((8, 8, 8)).astype(np.float32), DRAW.integers(0, 5, 8))}


def trained(given, data, **keys):
    """Return a run of a few steps on a device of a billion operations a second."""
    keys = {"epochs": 1, "global_batch": 4, "metrics": [], "peak_tflops": [1e-3], **keys}
    return fitted(solo(config(**keys), given, data))


def built(framework, name, args, **keys):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    return trained(None, DATA[name], model=f"{PACKAGE[framework]}.{name}:build", model_args=args, **keys)


def told(run):
    return run.records.latest["system"].values


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_perceptron_costs_its_products(framework):
    """Forward, and backward to both weights and to the second layer's inputs alone."""
    run = trained(make_model(framework), samples(16))
    found = told(run)
    assert found["flops"] == [2 * (2 * FEATURES * HIDDEN + 3 * HIDDEN * CLASSES)]
    assert found["peak_source"] == ["0.001 TFLOPS, key peak_tflops"] and found["peak_flops"] == [1e9]
    assert 0 < found["mfu"][0] < math.inf
    assert dict(summary.rows(run))["mfu"].endswith("GFLOP a sample, forward and backward")


@pytest.mark.slow
@pytest.mark.parametrize("name, args, remat", [("gpt", GPT, "every:1"), ("cnn", CNN, "off")])
def test_twins_cost_the_same_with_and_without_recomputed_blocks(name, args, remat):
    """A GPT: 6 x weights of products a token, and 12 x context x width a token and block for attention."""
    counted = [told(built(framework, name, args, remat=remat))["flops"] for framework in FRAMEWORKS]
    assert counted[0] == counted[1]
    if name == "gpt":
        weights = 12 * 8 * 8 + 8 * 6
        assert counted[0] == [4 * (6 * weights + 12 * 8 * 4)]


@pytest.mark.slow
def test_counting_changes_no_bit_of_a_training():
    with_it, without = (built("torch", "gpt", GPT, peak_tflops=peak) for peak in ([1e-3], []))
    assert bits(with_it) == bits(without)
    assert told(without)["flops"] == [None] and told(without)["mfu"] == [None]
    assert "mfu" not in dict(summary.rows(without))


def test_counting_draws_no_number_that_a_dataset_would_draw():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Noisy(torch.utils.data.Dataset):
        """Draws from both generators whenever it is read."""

        def __len__(self):
            return 16

        def __getitem__(self, i):
            return torch.full((FEATURES,), i / 16) + torch.randn(FEATURES) + float(np.random.normal()), i % CLASSES

    def train(peak):
        return trained(make_model("torch"), Noisy(), peak_tflops=peak)

    with_it, without = train([1e-3]), train([])
    assert told(with_it)["flops"] != [None] and bits(with_it) == bits(without)


def test_recurrent_layers_and_operations_of_others():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from hvdtrain.backends.torch.memory import _PRODUCTS

    @torch.library.custom_op("hvdtrain_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    twice.register_autograd(lambda ctx, grad: 2 * grad)

    class Last(torch.nn.Module):
        def __init__(self, after):
            super().__init__()
            self.layer, self.head, self.after = torch.nn.GRU(3, 4, batch_first=True), torch.nn.Linear(4, CLASSES), after

        def forward(self, x):
            return self.head(self.after(self.layer(x.reshape(len(x), 4, 3))[0][:, -1]))

    # On a CPU PyTorch makes a GRU of products: three gates, four moments, the first of which has no state before it.
    inputs, state, head = 2 * 2 * 4 * 3 * 12, 2 * (2 * 4 + 3) * 4 * 12, 3 * 2 * 4 * CLASSES
    assert told(trained(Last(torch.nn.Identity()), samples(8)))["flops"] == [inputs + state + head]
    found = told(trained(Last(twice), samples(8)))
    assert found["flops"] == [None] and found["flops_unknown"][0].startswith("PyTorch does not count hvdtrain_tests")
    assert all(_PRODUCTS.search(name) for name in ("_cudnn_rnn", "mkldnn_rnn_layer", "_thnn_fused_gru_cell", "addmm",
                                                   "_flash_attention_forward", "mkldnn_linear", "bmm"))
    assert not any(_PRODUCTS.search(name) for name in ("lgamma", "_convert_weight", "upsample_linear1d", "add", "mul"))


def test_a_loop_with_products_in_it_makes_the_number_unknown():
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    from hvdtrain.backends.tensorflow.footprint import Unknown, count

    @tf.function(input_signature=[tf.TensorSpec([3, 3]), tf.TensorSpec([], tf.int32)])
    def looped(x, n):
        return tf.while_loop(lambda i, y: i < n, lambda i, y: (i + 1, y @ y), [0, x])[1]

    with pytest.raises(Unknown, match="loop"):
        count(looped.get_concrete_function().graph)

    @tf.function(input_signature=[tf.TensorSpec([2, 3, 4]), tf.TensorSpec([3, 4])])
    def called(x, w):
        tf.matmul(x, w, transpose_b=True)  # nobody reads it
        return tf.einsum("...ij,kj->...ik", x, w), tf.function(lambda a: a @ tf.transpose(a))(w)

    assert count(called.get_concrete_function().graph) == 2 * 2 * 3 * 3 * 4 + 2 * 3 * 3 * 4


@pytest.mark.parametrize("device, kind, given, devices, found", [
    ("NVIDIA A100-SXM4-80GB", "tf32", 0, 1, (156e12, "156 TFLOPS, tf32 by the data sheet of NVIDIA A100-SXM4-80GB")),
    ("NVIDIA H200", "bf16", 0, 2, (1978e12, "2 x 989 TFLOPS, bf16 by the data sheet of NVIDIA H200")),
    ("Tesla V100-SXM2-16GB", "bf16", 0, 1, (None, "")), ("Intel(R) Xeon(R)", "fp32", 0, 1, (None, "")),
    ("Intel(R) Xeon(R)", "fp32", 2, 1, (2e12, "2 TFLOPS, key peak_tflops")), ("NVIDIA L4", "", 0, 1, (None, "")),
])
def test_where_a_peak_comes_from(device, kind, given, devices, found):
    assert flops.peak(DeviceFacts("cuda", device, ""), kind, given, devices) == found


def test_the_summary_tells_unlike_devices_and_what_is_not_known():
    found = {"mfu": [0.5, 0.25, None], "flops": [2e9, 2e9, None], "flops_unknown": ["", "", "a loop"],
             "peak_flops": [1.0] * 3, "peak_source": ["A", "A", "B"]}
    assert summary._utilisation(found) == [
        ("mfu", "50.0% on rank 0, 25.0% on rank 1 of A; 2 GFLOP a sample, forward and backward; not known, of B: a "
         "loop")]
    assert summary._mfu(SimpleNamespace(records=SimpleNamespace(latest={}))) is None


def test_words_of_modules():
    for module in (flops, peaks):
        assert doctest.testmod(module).attempted and not doctest.testmod(module).failed
