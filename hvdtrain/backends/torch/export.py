"""ONNX files and exported programs of a PyTorch model, also of a Keras model on PyTorch.

Owns the model's call and the names of inputs. The comparison is `hvdtrain.backends.exporting`'s.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from hvdtrain.backends.exporting import Exportable, Outputs, refused, verdict, verified, wide
from hvdtrain.backends.misfit import reason, told
from hvdtrain.backends.torch.keras import is_keras, without_tensorflow
from hvdtrain.backends.torch.modules import WRAPPERS
from hvdtrain.backends.torch.task import to_host
from hvdtrain.core.errors import UserError
from hvdtrain.core.resolve import not_installed
from hvdtrain.data.layout import OUTPUT, named_outputs

BATCH = "batch"
"""Name of the dimension of samples in ONNX files."""


def onnx(subject: Exportable, path: Path) -> str:
    """Write an ONNX file for any number of samples; return what was verified. Errors: `UserError`. OSError."""
    for package in ("onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise not_installed("--format onnx", package, "onnx")
    call = ModelCall(subject)
    with _quiet(), call.keras():
        program = call.exported()
        names = list(call.outputs(SINGLE))
        try:
            made = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=call.names, output_names=names,
                opset_version=subject.opset or None,
                dynamic_shapes=(tuple({0: BATCH} if each else {} for each in call.of_samples),))
        except Exception as error:  # of any kind, such as RuntimeError of a translation
            raise _untranslated(error) from error
        assert made is not None
        made.save(path)
    if importlib.util.find_spec("onnxruntime") is None:
        return 'not verified: onnxruntime is not installed; run pip install "hvdtrain[onnx]" to compare outputs'
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    taken = [one.name for one in session.get_inputs()]

    def run(inputs: Sequence[torch.Tensor]) -> Outputs:
        arrays = {name: tensor.cpu().numpy() for name, tensor in zip(call.names, inputs)}
        return dict(zip(names, session.run(names, {name: arrays[name] for name in taken})))

    return call.verify(run, "ONNX Runtime")


def program(subject: Exportable, path: Path) -> str:
    """Write a program for `torch.export.load`, which needs no model file; return what was verified."""
    call = ModelCall(subject)
    with _quiet(), call.keras():
        torch.export.save(call.exported(), path)
        loaded = torch.export.load(path).module()
        return call.verify(lambda inputs: _arrays(loaded(*inputs)), "torch.export.load")


def keras_file(subject: Exportable, path: Path) -> str:
    """Write the .keras file of a Keras model on PyTorch; return what was verified. Errors: `UserError`. OSError."""
    if not is_keras(subject.spec.model):
        raise UserError("--format keras of a model of PyTorch's own", "onnx or torch", "choose another --format")
    from hvdtrain.backends.keras import export

    with torch.no_grad(), without_tensorflow():
        return export.keras_file(subject, path)


SINGLE = 1
"""Samples of the smaller of the two batches that outputs are compared for."""


class ModelCall:
    """The call of a model in inference: its tensors in order (``tensors``) with a name each (``names``).

    ``of_samples``: whether the first dimension of each tensor is that of the samples. Tensors are on the CPU, except of
    Keras, whose device is that of the process.
    """

    def __init__(self, subject: Exportable) -> None:
        self.subject, self.samples = subject, len(subject.batch[0])
        self.model = _unwrapped(subject.parts.model)
        args, kwargs = self._call()
        flat, form = pytree.tree_flatten_with_path((args, kwargs))
        places = [i for i, (_, leaf) in enumerate(flat) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [flat[i][1].detach().to(self._device()) for i in places]
        self.names = self._names([flat[i][0] for i in places])
        self.of_samples = [t.dim() > 0 and len(t) == self.samples for t in self.tensors]
        constants = [None if isinstance(leaf, torch.Tensor) else leaf for _, leaf in flat]
        self.module = _Flat(self.model.to(self._device()), form, places, constants).eval()

    def exported(self) -> torch.export.ExportedProgram:
        """Return the model's graph for any number of samples. Errors: `UserError`."""
        dynamic = tuple({0: torch.export.Dim.DYNAMIC} if each else {} for each in self.of_samples)
        try:
            with torch.no_grad():
                return torch.export.export(self.module, tuple(self.tensors), dynamic_shapes=(dynamic,))
        except UserError:
            raise
        except Exception as error:  # of any kind: the model's own code runs in it
            raise refused(error, "torch.export") from error

    def outputs(self, samples: int) -> Outputs:
        """Return the model's own outputs of the first ``samples``."""
        with torch.no_grad(), self.keras():
            return _arrays(self.module(*self.first(samples)))

    def first(self, samples: int) -> list[torch.Tensor]:
        return [t[:samples] if each else t for t, each in zip(self.tensors, self.of_samples)]

    def verify(self, compute: Callable[[Sequence[torch.Tensor]], Outputs], reader: str) -> str:
        """Compare what ``compute(tensors)`` gives with the model's outputs, for two numbers of samples."""
        numbers, worst = [self.samples, SINGLE], 0.0
        for n in numbers:
            try:
                got = compute(self.first(n))
            except Exception as error:  # of the reader, which names no class of its own
                raise UserError(f"{reader} cannot run the exported model with {n} samples: {reason(error)}",
                                "a model that it runs", "choose another --format or --opset; nothing was written"
                                ) from error
            worst = max(worst, verified({name: wide(array) for name, array in got.items()}, self.outputs(n), reader))
        return verdict(reader, numbers, worst)

    def keras(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for calls of the model."""
        return without_tensorflow() if self._of_keras() else contextlib.nullcontext()

    def _of_keras(self) -> bool:
        return hasattr(self.model, "keras_model")

    def _device(self) -> torch.device:
        own = next(self.model.parameters(), None)
        return own.device if self._of_keras() and own is not None else torch.device("cpu")

    def _call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which the evaluator calls the model for the sample's outputs."""
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        model, batch = self.subject.parts.model, self.subject.batch
        if self._of_keras():  # whose call is no call of the module
            from hvdtrain.backends.keras.metrics import inputs_of

            return (_plain(inputs_of(self.model.keras_model, [torch.from_numpy(np.array(a)) for a in batch])),), {}
        hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
        try:
            with told(self.subject.spec.model, batch, evaluates=True):
                self.subject.parts.evaluator.outputs(batch)
        finally:
            hook.remove()
        if not calls:
            raise UserError("predict(model, batch) of the model file does not call the model", "a call of model(...)",
                            "call the model itself there, not one of its methods or parts")
        return _plain(calls[0])

    def _names(self, paths: Sequence[Any]) -> list[str]:
        if self._of_keras() and len(paths) == 1:
            return [getattr(self.model.keras_model, "input_names", ["x"])[0]]
        kinds = inspect.Parameter
        parameters = [p.name for p in inspect.signature(self.model.forward).parameters.values()
                      if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        return [_name(path, parameters) for path in paths]


CONTENTS = (torch.Tensor, tuple, list)
"""Types of outputs besides mappings; others are left out."""


class _Flat(torch.nn.Module):
    """Calls ``model`` with tensors in order, and returns its outputs by the names of `predict`."""

    def __init__(self, model: torch.nn.Module, form: Any, places: Sequence[int], constants: Sequence[Any]) -> None:
        super().__init__()
        self.model = model
        self._form, self._places, self._constants = form, places, constants

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self._constants)
        for place, tensor in zip(self._places, tensors):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        given = self.model(*args, **kwargs)
        if isinstance(given, Mapping):  # such as transformers' outputs, which may hold a cache
            given = {name: value for name, value in given.items() if isinstance(value, (Mapping, *CONTENTS))}
        found = named_outputs(given, lambda tensor: tensor)
        return found[OUTPUT] if list(found) == [OUTPUT] else found


def _arrays(found: Any) -> Outputs:
    return named_outputs(found, to_host)


def _plain(found: Any) -> Any:
    """Return mappings as dicts and sequences as lists or tuples, whose structure exporters know."""
    if isinstance(found, Mapping):
        return {key: _plain(value) for key, value in found.items()}
    if type(found) in (tuple, list):
        return type(found)(map(_plain, found))
    return found


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the user's module of a compiled or wrapped one."""
    kinds = {(home, name): held for home, name, held in WRAPPERS}
    while held := next((kinds[key] for c in type(model).__mro__ if (key := (c.__module__, c.__name__)) in kinds), ""):
        model = getattr(model, held)
    return model


def _name(path: Sequence[Any], parameters: Sequence[str]) -> str:
    """Return the name of an input: its parameter in the model's forward, and the keys within."""
    kind, own, *keys = [getattr(entry, "key", getattr(entry, "idx", entry)) for entry in path]
    if kind == 0:
        own = parameters[own] if own < len(parameters) else f"input_{own}"
    return ".".join(map(str, [own, *keys]))


def _untranslated(error: Exception) -> UserError:
    """Return the error of a graph with operations that ONNX does not have."""
    words, last = "", ""
    cause: BaseException | None = error
    while cause is not None and not words:
        found = re.search(r"OpOverload\(op='([^']+)'", str(cause))
        words, last, cause = found[1] if found else "", reason(cause), cause.__cause__ or cause.__context__
    got = f"the model uses {words}, which torch.onnx does not translate" if words else (
        f"torch.onnx cannot translate the model: {last}")
    return UserError(got, "operations that ONNX has", "replace it in the model's forward, try a higher --opset, or "
                     "choose --format torch")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' remarks about optional packages, and graphs that they print, from the output."""
    log = logging.getLogger("torch")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(
                io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)
