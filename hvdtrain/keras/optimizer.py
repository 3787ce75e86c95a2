"""Distribute Keras 3 optimizers: `DistributedOptimizer`, `PartialDistributedOptimizer`, `load_model`.

Owns the arguments and the class that is made, a subclass of the given optimizer's with its name and module, so that a
saved model loads without hvdtrain. `hvdtrain.keras.exchange` owns the step.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.core.errors import UserError, WrongValue
from hvdtrain.keras import hooks
from hvdtrain.keras.exchange import OptimizerExchange, Settings, exchange_of
from hvdtrain.tensorflow import Adasum, Average, Compression, Sum, global_process_set


def DistributedOptimizer(optimizer: Any, name: str | None = None, device_dense: str = "", device_sparse: str = "",
                         compression: Any = Compression.none, sparse_as_dense: bool = False,
                         gradient_predivide_factor: float = 1.0, op: Any = Average, backward_passes_per_step: int = 1,
                         average_aggregated_gradients: bool = False, num_groups: int = 0, groups: Any = None,
                         process_set: Any = global_process_set, scale_local_gradients: bool = True, *,
                         check_every: int = 200) -> Any:
    """Return a copy of ``optimizer`` that exchanges gradients over the ranks before it clips and updates.

    ``optimizer``: any `keras.optimizers.Optimizer`, also a LossScaleOptimizer; a built one hands on its state.
    ``name``: prefix of the collectives' names. ``device_dense``: where the exchange is placed; ``device_sparse`` is
    accepted as in Horovod, sparse gradients go the same way. ``op``: Average, Sum or Adasum.
    ``backward_passes_per_step``: passes whose gradients are summed on each rank before one exchange and update;
    ``average_aggregated_gradients`` divides that sum by their number. ``iterations`` counts updates, where Horovod's
    counted passes; a schedule of the learning rate is read at passes all the same, and keeps the length it had there.
    ``groups`` (or the old ``num_groups``): a number of groups, or lists of variables to be exchanged together.
    ``scale_local_gradients``: divide the gradients of local variables by the number of ranks.
    ``check_every``: updates between two comparisons of the ranks' weights, 0 for none (`hvdtrain.keras.guard`).

    Arguments and defaults are those of ``horovod.tensorflow.keras`` 0.28; ``check_every`` is ours.
    Raises `UserError` for anything but a Keras 3 optimizer, and for a distributed one.
    """
    if num_groups != 0:
        warnings.warn("num_groups is the old name of groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    gradients = {"op": op, "compression": compression, "sparse_as_dense": sparse_as_dense,
                 "gradient_predivide_factor": gradient_predivide_factor, "groups": groups}
    _check(optimizer, op, groups, backward_passes_per_step)
    optimizer = keras.optimizers.get(optimizer)
    hooks.install()
    settings = Settings(name or f"Distributed{type(optimizer).__name__}", device_dense, backward_passes_per_step,
                        average_aggregated_gradients, process_set, scale_local_gradients, check_every, gradients)
    return _taking_state(_like(optimizer, _distributed(type(optimizer), settings), settings.passes), optimizer)


def PartialDistributedOptimizer(optimizer: Any, name: str | None = None, device_dense: str = "",
                                device_sparse: str = "", compression: Any = Compression.none,
                                sparse_as_dense: bool = False, gradient_predivide_factor: float = 1.0,
                                op: Any = Average, groups: Any = None, process_set: Any = global_process_set,
                                local_layers: Any = None, scale_local_gradients: bool = True, *,
                                backward_passes_per_step: int = 1, average_aggregated_gradients: bool = False,
                                check_every: int = 200) -> Any:
    """Return a `DistributedOptimizer` that leaves the layers in ``local_layers`` to their ranks.

    ``local_layers``: a layer or several; they need not be built yet. Their variables are updated from their rank's own
    gradients (divided by the number of ranks with ``scale_local_gradients``) and are not compared.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise WrongValue(f"{type(layer).__name__} in local_layers", "Keras layers",
                             "name the layers themselves, or call register_local_var(variable) on the optimizer")
    made = DistributedOptimizer(optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
                                gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
                                0, groups, process_set, scale_local_gradients, check_every=check_every)
    exchange = exchange_of(made)
    assert exchange is not None
    exchange.settings.local_layers.extend(layers)
    return made


def _check(optimizer: Any, op: Any, groups: Any, passes: int) -> None:
    if not isinstance(optimizer, (str, keras.optimizers.Optimizer)):
        raise WrongValue(f"an optimizer of type {type(optimizer).__module__}.{type(optimizer).__name__}",
                         "one of keras.optimizers (Keras 3)",
                         "make it with keras.optimizers, not tf_keras or tf.compat")
    if exchange_of(optimizer) is not None:
        raise WrongValue("an optimizer that is already distributed", "a plain optimizer", "wrap it once")
    if op not in (Average, Sum, Adasum):
        raise WrongValue(f"op={op!r}", "hvd.Average, hvd.Sum or hvd.Adasum", "leave op out for the average")
    if groups is not None and not (isinstance(groups, list) or (isinstance(groups, int) and groups > 0)):
        raise WrongValue(f"groups={groups!r}", "a positive number of groups or a list of lists of variables",
                         "leave groups out for none")
    if not isinstance(passes, int) or passes < 1:
        raise WrongValue(f"backward_passes_per_step={passes!r}", "a whole number from 1 on", "give 1 for every pass")


def _distributed(base: Any, settings: Settings) -> Any:
    """Return a subclass of ``base`` whose ``apply`` exchanges first; each instance has an `OptimizerExchange`."""

    class Distributed(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._hvd_exchange = OptimizerExchange(settings)

        def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            exchange = self._hvd_exchange
            if exchange.inside or len(grads) == 0 or (trainable_variables is None and not self.built):
                return super().apply(grads, trainable_variables)
            variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
            update = super().apply
            return exchange.step(self, grads, variables, lambda reduced: update(reduced, variables))

        def register_local_var(self, var: Any) -> None:
            """Leave this variable to its rank: its gradient is not exchanged and it is not guarded."""
            self._hvd_exchange.register_local(var)

        @property
        def process_set(self) -> Any:
            """The ranks that exchange."""
            return settings.process_set

    _named_as(Distributed, base)
    _read_schedule_at_passes(Distributed, settings.passes)
    return Distributed


def _read_schedule_at_passes(cls: Any, passes: int) -> None:
    """Read a schedule at the pass that makes an update: Horovod's optimizers counted every pass."""
    if passes == 1:
        return
    plain, plain_build = cls._get_current_learning_rate, cls.build

    def rate(self: Any) -> Any:
        schedule = self._learning_rate
        if not isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            return plain(self)
        return schedule(self.iterations * passes + (passes - 1))

    def build(self: Any, variables: Sequence[Any]) -> None:
        plain_build(self, variables)
        for inner in getattr(self, "_inner_optimizers", ()):  # a MultiOptimizer's, all known only now
            inner.__class__ = _reading_at_passes(type(inner), passes)
    cls._get_current_learning_rate, cls.build = rate, build


def _reading_at_passes(base: Any, passes: int) -> Any:
    """Return a subclass of ``base``, an inner optimizer, with its names, which reads a schedule at passes."""
    plain = getattr(base, "_hvd_plain", base)
    cls = type(plain.__name__, (plain,), {"_hvd_plain": plain})
    _named_as(cls, plain)
    _read_schedule_at_passes(cls, passes)
    return cls


def _named_as(cls: Any, base: Any) -> None:
    """Give ``cls`` the names under which Keras saves and finds ``base``."""
    public = getattr(keras.optimizers, base.__name__, None) is base
    cls.__name__ = cls.__qualname__ = base.__name__
    cls.__module__ = "keras.optimizers" if public else base.__module__
    registered = keras.saving.get_registered_name(base)
    if not public and ">" in registered:
        package, _, short = registered.partition(">")
        keras.saving.register_keras_serializable(package, short)(cls)
        keras.saving.register_keras_serializable(package, short)(base)  # what a file's name leads to


def _like(optimizer: Any, cls: Any, passes: int = 1) -> Any:
    """Return an unbuilt ``cls`` configured as ``optimizer``; ``passes`` per update of an inner optimizer."""
    config = optimizer.get_config()
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        inner = optimizer.inner_optimizer
        kind = _reading_at_passes(type(inner), passes) if passes > 1 else type(inner)
        return cls(**{**config, "inner_optimizer": _taking_state(_like(inner, kind), inner, build=False)})
    several = getattr(keras.optimizers, "MultiOptimizer", ())  # Keras before 3.15 has none
    if isinstance(optimizer, several) and not hasattr(optimizer._optimizer_map, "values"):
        return cls(**{**config, "optimizer_map": optimizer._optimizer_map})  # a function, which chooses again
    takes = inspect.signature(type(optimizer).__init__).parameters
    lost = [p.name for p in takes.values() if p.name not in config and p.name != "self"
            and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if lost:
        raise UserError(f"{type(optimizer).__name__}.get_config() leaves out {', '.join(lost)}",
                        "all arguments of its __init__: the optimizer is rebuilt from them", "add them to get_config")
    rate = optimizer._learning_rate
    if not isinstance(rate, keras.Variable) and "learning_rate" in config:
        config["learning_rate"] = rate  # a schedule or a callable: the object itself
    return cls.from_config(config)


def _taking_state(made: Any, optimizer: Any, build: bool = True) -> Any:
    """Give ``made`` the state of ``optimizer``: its slots if built, else its iterations and learning rate."""
    for key, value in vars(optimizer).items():
        if key.startswith("_exclude_from_weight_decay"):
            setattr(made, key, value)
    if optimizer.built and build:
        with keras.name_scope(made.name, caller=made):
            made.build(list(optimizer._trainable_variables))
    if len(made.variables) == len(optimizer.variables):
        for mine, given in zip(made.variables, optimizer.variables):
            mine.assign(given)
    return made


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: dict[str, Any] | None = None,
               compression: Any = Compression.none, legacy_opts: bool = False, **distributed: Any) -> Any:
    """Load a Keras model and make its optimizer distributed, with the state it was saved with.

    ``custom_optimizers``: further optimizer classes. ``custom_objects``: as in `keras.models.load_model`.
    ``distributed``: further arguments of `DistributedOptimizer`. A model saved without an optimizer is returned as it
    is. A file has no local layers: name their variables again by ``model.optimizer.register_local_var(variable)``
    before training. ``legacy_opts``: True raises `UserError`, since Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise UserError("legacy_opts=True", "False: Keras 3 has no legacy optimizers",
                        "leave it out, and save the model with an optimizer of keras.optimizers")
    objects = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        return model
    if model.optimizer.built and not model.optimizer._trainable_variables and model.trainable_variables:
        model.optimizer = _rebuilt(model, filepath)
    optimizer = DistributedOptimizer(model.optimizer, compression=compression, **distributed)
    compiled = getattr(model, "_compile_config", None)
    if compiled is None:
        model.optimizer = optimizer
        return model
    arguments = {**compiled.config, "optimizer": optimizer}
    if arguments.get("jit_compile"):
        arguments["jit_compile"] = "auto"
    model.compile(**arguments)
    return model


def _rebuilt(model: Any, filepath: Any) -> Any:
    """Return the optimizer of a model from an HDF5 file, built for its variables, with the state in the file."""
    import h5py
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group as saved

    if isinstance(filepath, h5py.File):
        values = [np.asarray(value) for value in saved(filepath)]
    else:
        with h5py.File(str(filepath), "r") as file:
            values = [np.asarray(value) for value in saved(file)]
    optimizer = _like(model.optimizer, type(model.optimizer))
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(model.trainable_variables)
    if [tuple(v.shape) for v in optimizer.variables] == [value.shape for value in values]:
        for variable, value in zip(optimizer.variables, values):
            variable.assign(value)
    else:
        warnings.warn(f"{filepath} holds the state of an optimizer that is not Keras 3's {type(optimizer).__name__}: "
                      "it starts from scratch", stacklevel=3)
    return optimizer
